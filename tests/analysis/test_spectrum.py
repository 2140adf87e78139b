"""Spectra of a model: against dense SVDs, in portions, with padding."""

import pytest
import torch

from primal_attention import build_attention
from primal_attention.analysis import attention_matrices, spectrum

D, H, N = 21, 3, 29
NUMBERS = ("effective_rank", "directions", "entropy", "asymmetry", "redundancy", "num_tokens")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def batch(size=5, *, lengths=(N, 23, 17, 11, 2)):
    mask = torch.arange(N) < torch.tensor(lengths)[:size, None]
    x = torch.where(mask[..., None], torch.randn(size, N, D), torch.nan)
    return {"x": x, "token_mask": mask}


def rows(whole, some):
    return {name: each[some] for name, each in whole.items()}


def assert_same(one, other, tolerance=1e-10):
    for mine, its in zip(one.layers, other.layers, strict=True):
        for name in ("singular_values", "explained", "explained_deviation"):
            torch.testing.assert_close(
                getattr(mine, name), getattr(its, name), rtol=tolerance, atol=1e-9
            )
        for name in NUMBERS:
            assert getattr(mine, name) == pytest.approx(
                getattr(its, name), rel=1e-6, abs=1e-7, nan_ok=True
            ), name


@pytest.mark.parametrize("name", ["softmax", "linear", "primal", "softmax_bn_sh"])
def test_portions_make_no_difference(name):
    layer, whole = build_attention(name, D, H), batch()
    at_once = spectrum(layer, whole)
    in_turn = spectrum(layer, (rows(whole, slice(b, b + 1)) for b in range(5)))
    assert_same(at_once, in_turn, tolerance=1e-4 if name != "linear" else 1e-3)
    assert at_once[0].num_matrices == 5 * H


@pytest.mark.parametrize("name", ["softmax", "linear", "primal", "softmax_bn_sh"])
def test_padding_is_taken_out(name):
    """Not zeroed, which would leave rows and columns of zeros, and softmax rows of 1 / N."""
    layer, padded = build_attention(name, D, H).double(), batch()
    padded["x"] = padded["x"].double()
    shorter = [padded["x"][b, mask][None] for b, mask in enumerate(padded["token_mask"])]
    assert_same(spectrum(layer, padded), spectrum(layer, shorter), tolerance=1e-6)


def test_numbers_are_those_of_dense_matrices():
    layer, data = build_attention("softmax", D, H), batch(2)
    matrices = [heads.dense() for _, heads in attention_matrices(layer, data)]
    assert [each.shape[1] for each in matrices] == [N, 23]
    energies = [torch.linalg.svdvals(each).square() for each in matrices]
    curves = torch.ones(2 * H, N, dtype=torch.float64)
    for b, each in enumerate(energies):
        curves[b * H : (b + 1) * H, : each.shape[1]] = each.cumsum(1) / each.sum(1, keepdim=True)
    found = spectrum(layer, data)[0]
    torch.testing.assert_close(found.explained, curves.mean(0))
    torch.testing.assert_close(found.explained_deviation, curves.std(0, correction=0))
    needed = [int((curve < 0.9).sum()) + 1 for curve in curves]
    assert found.directions.mean == pytest.approx(sum(needed) / len(needed))
    assert found.num_directions(0.5) == int((curves.mean(0) < 0.5).sum()) + 1


def test_a_sequence_without_a_token_counts_for_nothing():
    layer = build_attention("softmax", D, H)
    some = batch(2, lengths=(N, 0))
    assert spectrum(layer, some)[0].num_matrices == H
    with pytest.raises(ValueError, match=r"data: no attention layer .* saw a real token"):
        spectrum(layer, batch(2, lengths=(0, 0)))


def test_layers_of_a_model_have_names_and_places():
    model = torch.nn.Sequential(*(build_attention(name, D, H) for name in ("softmax", "primal")))
    found = spectrum(model, torch.randn(2, N, D))
    assert [layer.attention for layer in found.layers] == ["softmax", "primal"]
    assert found["1"] is found[1]
    assert "effective rank" in str(found)
    with pytest.raises(KeyError, match="no layer is called '2'; there are 0, 1"):
        found["2"]


def test_a_shared_layer_is_heard_every_time():
    layer = build_attention("softmax", D, H)
    found = spectrum(torch.nn.Sequential(layer, layer), torch.randn(2, N, D))
    assert [each.num_matrices for each in found.layers] == [2 * 2 * H]


@pytest.mark.parametrize("data", [3, "x", [3]])
def test_data_of_another_kind_are_named(data):
    with pytest.raises(ValueError, match="data"):
        spectrum(build_attention("softmax", D, H), data)
