"""`primal generate`, and the other commands on a language model."""

import json
from pathlib import Path

import pytest

from primal_attention.cli.generate import read_prompt, text_of
from primal_attention.training.results import read_rows

from ..tasks.toy_text import WORDS, write_text
from .command import primal, sets, told

REPRODUCTION = Path(__file__).parents[2] / "reproduction"
SMALL = [
    *("num_layers=2", "dim=16", "num_heads=2", "ffn_dim=23", "dropout=0", "precision=fp32"),
    *("num_tokens=17", "context_tokens=5", "batch_size=8", "steps=60", "eval_every=30", "lr=0.01"),
    "attention.num_directions=3",
]
VOCABULARY = ["b", "<eos>", "a", "<unk>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text and a PrimalFormer that was trained on it."""
    folder = tmp_path_factory.mktemp("language")
    write_text(folder / "wikitext-2")
    options = ["--model", "primalformer", "--data", folder, "--out", folder / "runs", "--quiet"]
    result = primal("train", "language/wikitext-2", *options, *sets(*SMALL))
    assert result.exit_code == 0, result.output
    assert "test perplexity" in result.stdout
    return folder


@pytest.fixture(scope="module")
def run(folder):
    (directory,) = (folder / "runs/language/wikitext-2/primalformer/clean").iterdir()
    return directory


def generate(run, *arguments):
    result = primal("generate", run, *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_writes_what_it_has_learnt(run):
    words = generate(run, "a b c", "--tokens", 4, "--temperature", 0).stdout.split()
    assert words == list(WORDS)


@pytest.mark.parametrize("tokens", [1, 41])  # more than a window has
def test_the_prompt_and_so_many_words(run, tokens):
    text = generate(run, "c d", "--tokens", tokens, "--top-k", 3).stdout
    lines = text.removesuffix("\n").split("\n")
    words = [line.split() for line in lines]
    assert words[0][:2] == ["c", "d"]
    assert sum(map(len, words)) + len(lines) - 1 == 2 + tokens


def test_a_seed_decides(run):
    one, same, other = (
        generate(run, "a", "--tokens", 30, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert one == same != other


def test_without_a_prompt_a_line_begins(run):
    assert generate(run, "--tokens", 7, "--temperature", 0.5).stdout.split()


def test_unknown_words_are_told_and_read_as_unk(run):
    result = generate(run, "a zebra b [bold] zebra :smile:", "--tokens", 1)
    assert "not in the vocabulary, read as <unk>: zebra [bold] :smile:" in told(result)
    assert result.stdout.startswith("a <unk> b <unk> <unk> <unk>")
    assert "zebra" not in result.stdout


def test_prompts_and_texts_by_hand():
    assert read_prompt("a  b\nc", VOCABULARY) == ([1, 2, 0, 1, 3], ["c"])
    assert read_prompt("", VOCABULARY) == ([1], [])
    assert text_of([2, 0, 1, 1, 2], VOCABULARY) == "a b\n\na"


def test_mistakes_are_named(run, trained, tmp_path):
    refused = primal("generate", trained, "a")
    assert refused.exit_code == 2
    assert "a model of uea/JapaneseVowels writes no words" in told(refused)
    assert primal("generate", tmp_path / "none", "a").exit_code == 2
    for option, value in (("--tokens", 0), ("--temperature", -1), ("--top-k", 0)):
        refused = primal("generate", run, "a", option, value)
        assert refused.exit_code == 2
        assert option in told(refused)


def test_measured_again(run, folder):
    found = json.loads((run / "result.json").read_text())
    for split, key in (("test", "value"), ("valid", "valid")):
        measured = primal("evaluate", run, "--split", split, "--data", folder)
        assert measured.exit_code == 0, measured.output
        assert f"{split} perplexity {found[key]:.2f}" in measured.stdout
    write_text(folder / "other" / "wikitext-2", lines=(2, 1, 1))
    refused = primal("evaluate", run, "--data", folder / "other")
    assert refused.exit_code == 2
    assert "not those that the model was trained on" in told(refused)
    refused = primal("predict", "new.npy", "--checkpoint", run)
    assert "a model of language/wikitext-2 reads no time series" in told(refused)


def test_a_row_of_the_table(folder):
    (row,) = read_rows(folder / "runs" / "results.csv")
    assert (row["dataset"], row["metric"]) == ("wikitext-2", "perplexity")
    options = ["--folder", REPRODUCTION, "--results", folder / "runs" / "results.csv"]
    shown = primal("table", "language", *options, *sets(*SMALL))
    assert shown.exit_code == 0, shown.output
    assert "wikitext-103" in shown.stdout
    assert f"{float(row['value']):.1f}" in shown.stdout


def test_texts_are_listed_and_prepared(folder, tmp_path):
    write_text(tmp_path / "data" / "wikitext-2")
    listed = primal("data").stdout.splitlines()
    places = dict(line.split(maxsplit=1) for line in listed if line.startswith("language/"))
    assert places["language/wikitext-2"].endswith("data/wikitext-2")
    assert places["language/wikitext-103"] == "not at hand"
    prepared = primal("data", "language")
    assert prepared.exit_code == 0, prepared.output
    assert prepared.stdout.strip().endswith("data/language/wikitext-2.npz")
    refused = primal("data", "language", "wikitext-103")
    assert refused.exit_code == 2
    assert "wiki.train.tokens" in told(refused)
