"""Where the released code leaves the paper, and what is done here: see docs/deviations.md."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from primal_attention import PrimalAttention
from primal_attention.ops.landmarks import choose_landmarks

from .cases import B, D, H, M, N, S, assert_near, loss_of, make_inputs, make_layer
from .definition import released_j, runs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deviations.md"


@pytest.mark.parametrize("kind", ["static", "static causal", "sampled"])
def test_released_is_the_papers_objective_with_lambda_squared_over_n(kind):
    """D1, D2: Lambda of the paper is lambda_diag^2 / N of the released form."""
    layer, inputs = make_layer(kind), make_inputs(kind, masked=False)
    inputs.run(layer)
    released, zero = loss_of(layer, "released"), loss_of(layer, "zero")
    layer.lambda_diag = layer.lambda_diag.detach().square() / N
    inputs.run(layer)
    assert_near(loss_of(layer, "zero"), released)
    assert zero > 10 * released


def test_square_inside_and_outside_the_batch_mean_differ_by_the_variance():
    """D3: the mean of J^2 is the square of the mean of J plus the variance of J."""
    layer, inputs = make_layer(), make_inputs()
    inputs.run(layer)
    values = torch.stack([released_j(run) for run in runs(layer, inputs.x, **inputs.masks)])
    variance = values.var(correction=0)
    assert variance > 1e-4
    assert_near(loss_of(layer, "released") - loss_of(layer, "released_batch"), variance)


def test_a_second_equal_layer_doubles_zero_and_leaves_the_others():
    """D4: sum over layers against mean over layers."""
    layer, inputs = make_layer(), make_inputs()
    model = nn.ModuleList([layer, copy.deepcopy(layer)])
    for one in model:
        inputs.run(one)
    assert_near(loss_of(model, "zero"), 2 * loss_of(layer, "zero"))
    for objective in ("released", "released_batch", "explained_energy"):
        assert_near(loss_of(model, objective), loss_of(layer, objective))


def test_trace_is_that_of_the_parameters_and_for_dual_weights_that_given_the_data():
    """D5: with Lambda = 0 the trace term alone is left."""
    for kind in ("static", "sampled", "dual"):
        layer, inputs = make_layer(kind), make_inputs(kind, masked=False)
        layer.lambda_diag = torch.zeros(H, S)
        inputs.run(layer)
        if kind == "dual":
            traces = torch.stack([run.trace.mean() for run in runs(layer, inputs.x)])
        else:
            traces = sum(torch.trace(layer.w_e[h].T @ layer.w_r[h]) for h in range(H)) / H
        assert_near(loss_of(layer, "released"), traces.square().mean())


def test_lambda_acts_in_the_objectives_alone():
    layer, inputs = make_layer().eval(), make_inputs()
    before = inputs.run(layer)
    layer.lambda_diag = layer.lambda_diag.detach() + 1.0
    assert_near(inputs.run(layer), before, 0.0)


def test_lambda_is_positive_for_every_raw_parameter():
    """D7: where the released one may cross zero."""
    layer = make_layer()
    with torch.no_grad():
        layer.raw_lambda.copy_(torch.linspace(-20, 20, H * S).view(H, S))
    assert (layer.lambda_diag > 0).all()


@pytest.mark.parametrize("objective", ["zero", "released", "released_batch", "explained_energy"])
def test_padding_counts_as_tokens_only_where_no_mask_is_given(objective):
    """D8: the released layers see no mask; the same comes out here where none is passed."""
    layer, inputs = make_layer(), make_inputs(masked=False)
    padded = pad(inputs.x, (0, 0, 0, 5))
    token_mask = torch.arange(N + 5).expand(B, -1) < N
    alone = layer(inputs.x)
    expected = loss_of(layer, objective)
    masked = layer(padded, token_mask=token_mask)
    assert_near(masked[:, :N], alone)
    assert (masked[:, N:] == 0).all()
    assert_near(loss_of(layer, objective), expected)
    seen = layer(padded)[:, :N]
    assert (seen - alone).abs().max() > 1e-2
    assert abs(loss_of(layer, objective) - expected) > 1e-3


def test_number_of_landmarks():
    """D9: S * samples_per_direction whatever the length; max_tokens gives the paper's minimum."""
    assert PrimalAttention(D, H, S).num_landmarks == 10 * S
    assert PrimalAttention(D, H, S, max_tokens=N).num_landmarks == N < 10 * S
    assert PrimalAttention(D, H, S, max_tokens=1000).num_landmarks == 10 * S
    every_token = choose_landmarks(make_inputs().x, N).rows()  # M = N: all of them, in order
    assert torch.equal(every_token, make_inputs().x)
    repeated = choose_landmarks(make_inputs().x[:, :3], M).rows()
    assert len(repeated[0].unique(dim=0)) == 3


def positions(length, count):
    x = torch.arange(length, dtype=torch.float64).view(1, length, 1)
    return choose_landmarks(x, count).rows().flatten().long()


UEA = [(1751, 300), (62, 62), (152, 150), (152, 100), (405, 300), (405, 400), (26, 26), (144, 144)]
UEA += [(1751, 400), (896, 300), (1152, 200), (93, 93), (315, 200), (315, 315), (29, 29)]
OTHERS = [(2048, 200), (2048, 300), (4096, 200), (4096, 300), (1024, 200), (1024, 300), (197, 197)]


@pytest.mark.parametrize("length, count", UEA + OTHERS)
def test_landmarks_are_the_released_ones_at_the_papers_sizes(length, count):
    released = torch.linspace(0, length - 1, count, dtype=torch.int64)
    assert torch.equal(positions(length, count), released)


@pytest.mark.parametrize("length, count", [(136, 100), (170, 300), (414, 400)])
def test_landmarks_are_exact_where_the_released_ones_are_rounded(length, count):
    exact = torch.tensor([i * (length - 1) // (count - 1) for i in range(count)])
    released = torch.linspace(0, length - 1, count, dtype=torch.int64)
    assert torch.equal(positions(length, count), exact)
    assert (released - exact).abs().max() == 1
    assert (released != exact).sum() <= 3


def test_sampled_weights_cannot_be_causal():
    with pytest.raises(ValueError, match="causal"):
        PrimalAttention(D, H, S, weights="sampled", causal=True)


def test_every_test_named_on_the_page_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", PAGE.read_text())
    assert len(named) > 20
    for path, function in named:
        source = (ROOT / path).read_text()
        assert function == "" or f"def {function}(" in source, f"{path}::{function}"
