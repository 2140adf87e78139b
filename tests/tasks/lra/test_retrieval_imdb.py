from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from primal_attention.tasks.lra import PartSizes
from primal_attention.tasks.lra.texts import read_retrieval_imdb

from .toy_files import write_imdb

SIZES = PartSizes(200, 21, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Films of 1 to 8 reviews; the last film of train has reviews in test too."""
    path = tmp_path_factory.mktemp("data") / "aclImdb"
    rng = np.random.default_rng(0)
    films = {
        part: [film for i in range(40) for film in [f"tt{part}{i}"] * int(rng.integers(1, 5))]
        for part in ("train", "test")
    }
    write_imdb(
        path,
        {
            "train": {"neg": films["train"], "pos": films["train"]},
            "test": {"neg": films["test"], "pos": films["test"] + ["tttrain39"] * 30},
        },
    )
    twice = path / "train" / "pos" / "0_0.txt"
    twice.write_bytes((path / "train" / "neg" / "0_0.txt").read_bytes())
    for name in ("neg/30_0.txt", "pos/50_0.txt"):  # of one film and of another
        (path / "train" / name).write_text("of two films")
    return path


@pytest.fixture(scope="module")
def prepared(folder):
    return read_retrieval_imdb(folder, sizes=SIZES, seed=1)


def pairs(prepared):
    """The texts and the label of every pair, by part."""
    texts = [bytes(row[row > 0] - 1).decode() for row in prepared.tokens]
    assert len(set(texts)) == len(texts)
    cases = [
        (texts[one], texts[other], label)
        for (one, other), label in zip(prepared.pairs, prepared.targets, strict=True)
    ]
    ends = np.cumsum([0, *prepared.sizes])
    return [cases[start:end] for start, end in pairwise(ends)]


def film(text):
    return text.split()[0]


def test_the_label_says_whether_the_films_are_the_same(prepared):
    for part in pairs(prepared):
        for one, other, label in part:
            assert (film(one) == film(other)) == bool(label)
            assert one != other


def test_parts_are_balanced_and_of_the_sizes_told(prepared):
    parts = pairs(prepared)
    assert [len(part) for part in parts] == list(SIZES)
    assert [sum(label for _, _, label in part) for part in parts] == [100, 10, 25]


def test_a_text_of_two_films_is_left_out(prepared):
    assert not any("of two films" in case[:2] for part in pairs(prepared) for case in part)


def test_no_film_is_in_two_parts(prepared):
    train, valid, test = (
        {film(text) for case in part for text in case[:2]} for part in pairs(prepared)
    )
    assert not train & valid and not train & test and not valid & test
    assert "tttrain39" not in test


def test_parts_come_from_their_official_part(prepared):
    for name, part in zip(("train", "train", "test"), pairs(prepared), strict=True):
        assert all(f"reviewed in {name}" in text for case in part for text in case[:2])


def test_positive_pairs_are_different(prepared):
    for part in pairs(prepared):
        positive = [frozenset(case[:2]) for case in part if case[2]]
        assert len(set(positive)) == len(positive)


def test_a_review_tells_nothing_by_itself(prepared):
    for part in (pairs(prepared)[0], pairs(prepared)[2]):
        in_positive, in_negative = (
            Counter(text for case in part if case[2] == label for text in case[:2])
            for label in (1, 0)
        )
        assert in_positive == in_negative


def test_pairs_depend_on_the_seed_alone(folder, prepared):
    again, other = (read_retrieval_imdb(folder, sizes=SIZES, seed=seed) for seed in (1, 2))
    assert again.checksum() == prepared.checksum() != other.checksum()


def test_too_few_pairs_or_lines_are_told(folder, tmp_path):
    with pytest.raises(ValueError, match="sizes asks for 50000 pairs of one film"):
        read_retrieval_imdb(folder, sizes=PartSizes(100_000, 10, 10))
    one_film = {"neg": ["tt1"] * 5, "pos": ["tt1"] * 5}
    write_imdb(tmp_path, {"train": one_film, "test": one_film})
    (tmp_path / "train" / "urls_pos.txt").write_text("http://a/tt1/\n")
    with pytest.raises(ValueError, match=r"urls_pos\.txt has 1 lines; review 1 needs line 2"):
        read_retrieval_imdb(tmp_path)
