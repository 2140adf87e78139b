"""Requirements on every mechanism of the registry."""

import csv
import importlib.util
from pathlib import Path

import pytest
import torch

from primal_attention import ATTENTIONS, build_attention

from .registry import NAMES, assert_keeps_the_contract, build

ROOT = Path(__file__).parents[3]


def test_the_registry_has_the_mechanisms_of_both_papers():
    assert list(ATTENTIONS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    assert_keeps_the_contract(name, causal=False)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_and_bad_values_are_refused(name):
    with pytest.raises(TypeError, match="no_such_option"):
        build(name, False, no_such_option=1)
    with pytest.raises(ValueError, match=r"dim.*33"):
        build_attention(name, 33, 4)
    with pytest.raises(ValueError, match=r"dropout.*1\.5"):
        build(name, False, dropout=1.5)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_mechanism_cannot_do_is_a_clear_error(name):
    about = ATTENTIONS[name].mechanism
    if not about.causal:
        with pytest.raises(ValueError, match="causal"):
            build_attention(name, 32, 4, causal=True)
    x = torch.randn(2, 7, 32)
    layer = build(name, False).eval()
    if about.cross:
        assert layer(x, torch.randn(2, 11, 32)).shape == x.shape
    else:
        with pytest.raises(ValueError, match="context"):
            layer(x, torch.randn(2, 11, 32))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("softmax", "linear"))])
def test_softmax_and_linear_share_parameter_names(name):
    layer = build(name, False)
    names = {parameter.split(".")[0] for parameter in layer.state_dict()}
    assert {"q_proj", "k_proj", "v_proj", "out_proj"} <= names


def test_the_page_of_mechanisms_is_what_the_registry_says():
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs/make_mechanisms.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert (ROOT / "docs/mechanisms.md").read_text() == make.page()


def test_every_mechanism_has_measured_errors_within_bounds():
    with (ROOT / "benchmarks/results/precision.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["mechanism"] for row in rows} == set(NAMES)
    bounds = {"float32": 5e-5, "bfloat16": 2e-2, "float16": 4e-3}
    for row in rows:
        if row["mechanism"] != "reformer":  # half precision hashes some tokens otherwise
            assert float(row["output"]) < bounds[row["dtype"]], row
