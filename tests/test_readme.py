"""What a newcomer asks in the first minute, and the line of the README that answers it."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())
MINUTE = 250  # words a minute, of a reader who is not in a hurry

ANSWERS = {
    "What is it?": "Attention layers for PyTorch whose time and memory grow linearly",
    "Is it for encoders as well as decoders?": "encode or classify 4,000 tokens and more",
    "Why instead of PyTorch's attention?": "7 times faster than softmax attention at 4,096 tokens",
    "Which paper is it?": "**Primal-Attention** (Chen et al., NeurIPS 2023)",
    "How do I install it?": "pip install .            # torch, numpy and einops",
    "How do I see it work?": "make demo ",
    "The lines for a layer of my own?": 'build_attention("primal_time", 64, 4, causal=True)',
    "Which way round is the mask?": "# True = real token",
    "The lines for a pretrained model?": 'patch(student, "primal", layers="all")',
    "Does patching keep the accuracy?": "New parameters start at random",
    "The lines for time series?": "model = PrimalFormerClassifier(",
    "When should I not use it?": "**not this**: softmax attention",
    "May I have attention weights?": "there is no N x N matrix",
    "Is it as accurate as softmax attention?": "ties with softmax attention or loses to it",
    "And flash-linear-attention?": "flash-linear-attention were not measured",
    "Where is the rest?": "## Find your way",
    "May I use it?": "MIT licence",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_line_answers(question):
    answer = ANSWERS[question]
    assert answer in README or " ".join(answer.split()) in PROSE


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_what_why_and_install_are_read_in_a_minute():
    beginning = README[: README.index("## Use")]
    assert len(beginning.split()) <= MINUTE


@pytest.mark.parametrize("question", ["Why instead of PyTorch's attention?"])
def test_the_advantage_is_that_of_the_rows(question):
    rows = runpy.run_path(str(ROOT / "docs/make_tables.py"))["layers"]()
    times = [
        float(rows[mechanism, weights, "False", "4096"]["gpu_ms"])
        for mechanism, weights in (("softmax", ""), ("primal", "sampled"))
    ]
    assert f"{times[0] / times[1]:.0f} times faster" in ANSWERS[question]


def test_what_patching_costs_is_that_of_the_notebook():
    cells = json.loads((ROOT / "docs/notebooks/patch_a_transformer.ipynb").read_text())["cells"]
    printed = "".join(
        "".join(output.get("text", [])) for cell in cells for output in cell.get("outputs", [])
    )
    before, after = re.search(r"falls from ([\d.]+) to ([\d.]+) %", PROSE).groups()
    assert re.search(rf"before +{before} %", printed)
    assert re.search(rf"all layers +{after} %", printed)
