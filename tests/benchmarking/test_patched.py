"""The script that times models before and after patching, on models that take no time."""

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/patched.py"


@pytest.fixture
def script(monkeypatch):
    program = runpy.run_path(str(SCRIPT))
    hosts = program["HOSTS"]
    monkeypatch.setitem(hosts, "tiny", program["Host"](2, 14, 2))
    monkeypatch.setitem(hosts, "tiny-causal", program["Host"](2, 14, 2, causal=True))
    return program


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    """The script with these arguments; the rows of its file."""

    def call(*arguments):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["patched.py", "--out", str(tmp_path), *arguments])
        script["main"](script["parse_arguments"]())
        files = list(tmp_path.iterdir())
        return list(csv.DictReader(files[0].read_text().splitlines())) if files else []

    return call


def forms_of(rows, **cells):
    found = [row for row in rows if cells.items() <= row.items()]
    return [(row["patched"], row["weights"]) for row in found]


def test_every_form_is_timed_in_both_passes_at_every_length(run):
    rows = run("--models", "tiny", "tiny-causal", "--tokens", "11", "23", "--total", "33")
    assert all(int(row["tokens_per_s"]) > 0 and not row["note"] for row in rows)
    for tokens, batch in (("11", "3"), ("23", "1")):
        for kind in ("fwd", "fwd+bwd"):
            cells = {"tokens": tokens, "batch": batch, "pass": kind}
            plain = [("none", ""), ("last", "sampled"), ("all", "sampled"), ("all", "dual")]
            assert forms_of(rows, model="tiny", **cells) == plain
            causal = [("none", ""), ("last", "static"), ("all", "static"), ("all", "dual")]
            assert forms_of(rows, model="tiny-causal", **cells) == causal


def test_rates_are_compared_with_the_model_before(run):
    rows = run("--models", "tiny", "--tokens", "11")
    (before,) = [r for r in rows if r["patched"] == "none" and r["pass"] == "fwd"]
    assert before["against_unpatched"] == "1.000"
    (after,) = [r for r in rows if r["patched"] == "last" and r["pass"] == "fwd"]
    ratio = int(after["tokens_per_s"]) / int(before["tokens_per_s"])
    assert float(after["against_unpatched"]) == pytest.approx(ratio, abs=1e-3)


def test_rows_measured_again_are_replaced_and_others_kept(run):
    first = run("--models", "tiny", "--tokens", "11", "--total", "11")
    again = run("--models", "tiny", "--tokens", "11", "13", "--total", "11")
    assert len(first) == 8 and len(again) == 16
    assert len({tuple(row.values())[:7] for row in again}) == 16
    assert [row["tokens"] for row in again].count("11") == 8


def test_nothing_is_begun_when_the_time_is_up(run, capsys):
    assert run("--models", "tiny", "--tokens", "11", "--seconds", "0") == []
    assert capsys.readouterr().out.count("the time was up") == 8


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "minilm", "distilgpt2"])
def test_bodies_have_the_sizes_that_they_are_known_by(script, name):
    with torch.device("meta"):
        body = script["HOSTS"][name].body(64)
    blocks = {"bert-base": 85.1e6, "gpt2": 85.1e6, "minilm": 10.6e6, "distilgpt2": 42.5e6}[name]
    assert sum(p.numel() for p in body.parameters()) == pytest.approx(blocks, rel=0.01)


@pytest.mark.parametrize(("patched", "layers"), [("none", 0), ("last", 1), ("all", 2)])
def test_the_layers_that_are_named_are_patched(script, patched, layers):
    from primal_attention import PrimalAttention

    weights = "" if patched == "none" else "sampled"
    body = script["Body"](script["HOSTS"]["tiny"].body(11), script["Form"](patched, weights))
    assert sum(isinstance(each, PrimalAttention) for each in body.modules()) == layers
    outputs = body.train()(torch.randn(3, 11, 14))
    assert [y.shape for y in outputs][1:] == [()] * bool(layers)
    assert len(body.eval()(torch.randn(3, 11, 14))) == 1
