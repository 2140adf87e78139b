"""Texts: their words, windows, losses and prepared files."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.models import LanguageModel, build_attentions
from primal_attention.tasks import PERPLEXITY, find_language, language_task, prepare_language
from primal_attention.tasks.language import load_language, losses, read_corpus, text_windows
from primal_attention.tasks.language.losses import token_losses

from .toy_text import PARTS, write_text

V = 13


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of WikiText-2, or so they are called."""
    write_text(tmp_path / "data" / "wikitext-2")
    return tmp_path / "data"


def write(folder, train="b a b\n", valid="a\n", test="b\n"):
    folder.mkdir(exist_ok=True)
    for part, text in zip(PARTS, (train, valid, test), strict=True):
        (folder / f"wiki.{part}.tokens").write_bytes(text.encode())
    return folder


def random_text(length, seed=0):
    return np.random.default_rng(seed).integers(V, size=length).astype(np.uint16)


# Words


def test_words_are_numbered_by_frequency_and_lines_end_in_eos(tmp_path):
    corpus = read_corpus(write(tmp_path, " b a b \n \n c b a \r\n", valid="a\n", test="c b\n"))
    assert corpus.vocabulary == ("b", "<eos>", "a", "c", "<unk>")
    assert corpus.train.tolist() == [0, 2, 0, 1, 1, 3, 0, 2, 1]
    assert corpus.test.tolist() == [3, 0, 1]
    assert corpus.train.dtype == np.uint16


def test_unknown_words_are_unk(tmp_path):
    corpus = read_corpus(write(tmp_path, "a <unk> a\n", valid="a never\n", test="heard of\n"))
    assert corpus.vocabulary == ("a", "<unk>", "<eos>")
    assert corpus.valid.tolist() == [0, 1, 2]
    assert corpus.test.tolist() == [1, 1, 2]


def test_lines_end_at_newlines_alone(tmp_path):
    corpus = read_corpus(write(tmp_path, "a\u2028b \u0085 a \r a\n"))
    assert corpus.train.tolist().count(corpus.vocabulary.index("<eos>")) == 1


def test_more_words_than_two_bytes_number(tmp_path):
    words = " ".join(str(number) for number in range(2**16 - 1))  # and <eos>, <unk>
    corpus = read_corpus(write(tmp_path, f"{words}\n", valid="65534\n"))
    assert corpus.valid.dtype == np.uint32
    assert corpus.vocabulary[corpus.valid[0]] == "65534"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"wiki\.valid\.tokens is not a whole text .*it has no words"),
        (b" \n\n", r"wiki\.valid\.tokens is not a whole text .*it has no words"),
        (b"a b", r"wiki\.valid\.tokens is not .*ends within a line: is it cut off"),
        (b"a \xc3\n", r"wiki\.valid\.tokens is not a whole text in UTF-8"),
    ],
)
def test_files_that_are_not_whole_are_named(tmp_path, content, message):
    (write(tmp_path / "wikitext-2") / "wiki.valid.tokens").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_language("wikitext-2", tmp_path)
    with pytest.raises(ValueError, match=message):
        prepare_language("wikitext-2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["wikitext-2"]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wiki\.train\.tokens.*wikitext-103-v1\.zip"):
        load_language("wikitext-103", tmp_path)
    with pytest.raises(ValueError, match="did you mean one of wikitext-2"):
        find_language("wikitext2", tmp_path)
    (write(tmp_path) / "wiki.test.tokens").unlink()
    with pytest.raises(FileNotFoundError, match=r"wiki\.test\.tokens is missing"):
        load_language("wikitext-2", tmp_path)


# Places


def test_places_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    assert find_language("wikitext-2") is None
    write_text(tmp_path / "wikitext-2")
    assert find_language("wikitext-2") == tmp_path / "wikitext-2"
    assert find_language("wikitext-2", tmp_path / "wikitext-2") == tmp_path / "wikitext-2"
    assert find_language("wikitext-103") is None
    path = prepare_language("wikitext-2")
    assert path == tmp_path / "language" / "wikitext-2.npz" == find_language("wikitext-2")


def test_a_prepared_text_is_the_text(folder, tmp_path):
    path = prepare_language("wikitext-2", folder, tmp_path / "out")
    plain, prepared = load_language("wikitext-2", folder), load_language("wikitext-2", path.parent)
    assert prepared.vocabulary == plain.vocabulary
    for part in PARTS:
        assert getattr(prepared, part).dtype == np.uint16
        assert (getattr(prepared, part) == getattr(plain, part)).all()


def test_a_prepared_file_that_is_not_whole_is_refused(folder):
    path = prepare_language("wikitext-2", folder)
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"vocabulary": arrays["vocabulary"][:5]})
    with pytest.raises(ValueError, match=r"wikitext-2\.npz is not a whole prepared text .*anew"):
        load_language("wikitext-2", folder)


# Windows


def counted_words(cases):
    """Each word that counts, with the tokens that its window has before it, in order."""
    for ids, target in zip(cases.inputs["ids"].tolist(), cases.target.tolist(), strict=True):
        for place, word in enumerate(target):
            if word >= 0:
                yield word, ids[: place + 1]


@given(st.integers(1, 60), st.integers(1, 23), st.data())
def test_every_word_counts_once_with_what_came_before_it(length, num_tokens, data):
    context = data.draw(st.integers(0, num_tokens - 1))
    text = random_text(length)
    cases = text_windows(text, num_tokens, context_tokens=context, first=7)
    stream = [7, *text.tolist()]
    assert cases.inputs["ids"].shape == cases.target.shape
    assert cases.target.shape[1] == min(num_tokens, length)
    found = list(counted_words(cases))
    assert [word for word, _ in found] == stream[1:]
    for place, (_, before) in enumerate(found):
        assert before == stream[place + 1 - len(before) : place + 1]
        assert len(before) > min(context, place)


def test_windows_by_hand():
    cases = text_windows(np.arange(1, 9, dtype=np.uint16), 5, context_tokens=3)
    assert cases.inputs["ids"].tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]
    ignored = [-100] * 3
    assert cases.target.tolist() == [[1, 2, 3, 4, 5], [*ignored, 6, 7], [*ignored, -100, 8]]


@pytest.mark.parametrize(("num_tokens", "context"), [(0, 0), (5, 5), (5, -1)])
def test_windows_that_make_no_sense(num_tokens, context):
    with pytest.raises(ValueError, match=r"num_tokens.*got"):
        text_windows(random_text(11), num_tokens, context_tokens=context)


# Losses


def reference(logits, target):
    """As torch computes it."""
    return F.cross_entropy(logits.transpose(1, 2), target.long(), reduction="none")


@pytest.mark.parametrize("piece", [1, 3 * V, 2**24])
def test_losses_and_gradients_are_those_of_torch(monkeypatch, piece):
    monkeypatch.setattr(losses, "_PIECE", piece)
    leaf = torch.randn(3, 5, V, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, (3, 5), dtype=torch.int32)
    target[0, 1] = target[2] = -100
    weights = torch.randn(3, 5, dtype=torch.float64)
    gradients = []
    for compute in (token_losses, reference):
        found = compute(10 * leaf, target)
        gradients.append(torch.autograd.grad((found * weights).sum(), leaf)[0])
        torch.testing.assert_close(found, reference(10 * leaf, target))
        assert (found[2] == 0).all()
    torch.testing.assert_close(*gradients)


def test_low_precision_adds_up_in_a_higher_one():
    logits = torch.randn(2, 3, 4001).bfloat16()
    target = torch.randint(4001, (2, 3))
    found = token_losses(logits, target)
    torch.testing.assert_close(found.float(), reference(logits.float(), target))


def test_the_backward_pass_needs_no_second_copy_and_runs_once():
    leaf = torch.randn(2, 3, V, requires_grad=True)
    logits = 2 * leaf
    loss = token_losses(logits, torch.randint(V, (2, 3))).sum()
    storage = []
    logits.register_hook(lambda gradient: storage.append(gradient.data_ptr()))
    loss.backward(retain_graph=True)
    assert storage == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The task


def small_model(vocab_size, dtype=torch.float64):
    torch.manual_seed(0)
    attentions = build_attentions("softmax", 2, 8, 2, causal=True)
    model = LanguageModel(vocab_size, attentions, 8, 11).to(dtype).eval()
    torch.nn.init.normal_(model.tokens.weight)
    return model


@torch.no_grad()
def plain_perplexity(model, text, first, num_tokens, step):
    """One word after the other, each from the window that counts it."""
    stream = torch.tensor([first, *text.tolist()])
    total = 0.0
    for place in range(len(text)):
        end = num_tokens + step * max(0, math.ceil((place + 1 - num_tokens) / step))
        start = min(end, len(text)) - min(num_tokens, len(text))
        logits = model(stream[None, start : place + 1])[0, -1]
        total += -logits.log_softmax(-1)[stream[place + 1]].item()
    return math.exp(total / len(text))


@pytest.mark.parametrize(("num_tokens", "context"), [(23, 0), (23, 17), (10_000, 0)])
def test_perplexity_is_that_of_a_plain_loop(folder, num_tokens, context):
    task = language_task("wikitext-2", folder=folder, num_tokens=num_tokens, context_tokens=context)
    model = small_model(task.sizes.vocab_size)
    corpus = load_language("wikitext-2", folder)
    first = corpus.vocabulary.index("<eos>")
    expected = plain_perplexity(model, corpus.test, first, num_tokens, num_tokens - context)
    cases, goal = task.test, task.goal
    with torch.no_grad():
        losses = goal.losses(model(**cases.inputs), cases.target)
    weights = goal.weights(cases.target)
    assert losses.shape == weights.shape == (len(cases),)
    assert goal.value((losses.sum() / weights.sum()).item()) == pytest.approx(expected, rel=1e-12)


def test_what_a_task_says_of_itself(folder):
    task = language_task("wikitext-2", folder=folder, num_tokens=19, context_tokens=7)
    assert (task.name, task.goal, task.goal.metric) == (
        "language/wikitext-2",
        PERPLEXITY,
        "perplexity",
    )
    assert not task.goal.higher_is_better
    assert task.sizes.num_tokens == 19
    assert task.sizes.num_outputs == task.sizes.vocab_size == len(task.labels) == 9
    assert (task.train.target[:-1] >= 0).all()  # training counts every word of a window
    assert (task.test.target[1] < 0).sum() == 7


@pytest.mark.parametrize("loss", [800.0, math.inf, math.nan])
def test_a_loss_beyond_all_numbers_is_never_the_best(loss):
    assert PERPLEXITY.value(loss) == math.inf
