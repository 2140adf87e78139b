"""The distance of a Primal layer from the KSVD: zero at the solution, and nowhere else."""

import pytest
import torch

from primal_attention import PrimalAttention, build_attention, ksvd_loss
from primal_attention.analysis import duality
from primal_attention.analysis.capture import capture
from primal_attention.analysis.duality import heads_of
from primal_attention.theory.ksvd import best_unexplained_energy, solve_dual, stationary_point

D, N, S = 23, 19, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def layer_of(weights):
    """One head in float64, with as many landmarks as parameters have rows."""
    layer = PrimalAttention(D, 1, S, weights=weights, samples_per_direction=5)
    return layer.double().eval()


def sequence_of(layer, x):
    ((_, run),) = capture(layer, x)
    (sequence,) = run.sequences()
    return sequence


def tokens():
    return torch.randn(1, N, D, dtype=torch.float64)


@torch.no_grad()
def solve(layer, x):
    """Give the layer the leading solution of eq. (7) on x."""
    phi_q, phi_k, f_x = (each if each is None else each[0] for each in sequence_of(layer, x)[:3])
    if layer.weights != "dual":
        point = stationary_point(phi_q, phi_k, S, f_x)
        layer.w_e.copy_(point.w_e[None])
        layer.w_r.copy_(point.w_r[None])
        layer.lambda_diag = point.lambda_diag[None]
        return
    dual = solve_dual(phi_q @ phi_k.T, S)
    wanted = N**0.5 * torch.cat([dual.h_e, dual.h_r], dim=1)  # [N, 2S]
    layer.h_proj.weight.copy_(torch.linalg.lstsq(x[0], wanted).solution.T)
    layer.h_proj.bias.zero_()
    layer.lambda_diag = N / dual.singular_values[None]


WEIGHTS = ["static", "sampled", "dual"]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_at_the_solution_everything_holds(weights):
    layer, x = layer_of(weights), tokens()
    solve(layer, x)
    (found,) = duality(layer, x).layers
    assert found.kkt.mean < 1e-8
    assert abs(found.objective.mean) < 1e-8
    assert found.relative_objective.mean < 1e-8
    assert found.explained.mean == pytest.approx(found.best.mean, abs=1e-8)
    assert found.subspaces.mean == pytest.approx(found.best.mean, abs=1e-8)
    assert found.best.mean < 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_elsewhere_nothing_does(weights):
    (found,) = duality(layer_of(weights), tokens()).layers
    assert found.kkt.mean > 0.1
    assert found.relative_objective.mean > 1e-3
    assert found.explained.mean <= found.subspaces.mean < found.best.mean - 0.01


@pytest.mark.parametrize("weights", WEIGHTS)
def test_j_and_the_energy_are_those_of_the_objectives(weights):
    layer = PrimalAttention(22, 2, S, weights=weights, samples_per_direction=5).double()
    x = torch.randn(1, N, 22, dtype=torch.float64)
    (found,) = duality(layer, x).layers
    layer.train()(x)
    assert found.objective.mean**2 == pytest.approx(ksvd_loss(layer, objective="zero").item())
    unexplained = ksvd_loss(layer, objective="explained_energy").item()
    assert 1 - found.explained.mean == pytest.approx(unexplained)


def test_the_wrong_scale_costs_the_energy_but_not_the_subspaces():
    layer, x = layer_of("static"), tokens()
    solve(layer, x)
    layer.lambda_diag = layer.lambda_diag.detach() * 3
    (found,) = duality(layer, x).layers
    assert found.explained.mean < 0
    assert found.subspaces.mean == pytest.approx(found.best.mean, abs=1e-9)
    assert found.kkt.mean > 0.1


def test_the_best_is_that_of_eckart_and_young():
    layer, x = layer_of("static"), tokens()
    sequence = sequence_of(layer, x)
    head = heads_of(sequence)
    values = torch.linalg.svdvals(sequence.phi_q[0] @ sequence.phi_k[0].T)
    assert head.best.item() == pytest.approx(1 - float(best_unexplained_energy(values, S)))


def test_more_directions_than_singular_values_can_explain_all():
    layer = PrimalAttention(6, 2, 5, weights="static").double()
    (found,) = duality(layer, torch.randn(1, N, 6, dtype=torch.float64)).layers
    assert found.best.mean == pytest.approx(1)
    assert found.subspaces.mean == pytest.approx(1)


def test_padding_counts_for_nothing():
    layer = PrimalAttention(22, 2, S)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 5:8] = False
    x = torch.randn(2, N, 22)
    masked = {"x": torch.where(mask[..., None], x, torch.nan), "token_mask": mask}
    one, other = duality(layer, masked), duality(layer, [x[:1], x[1:, mask[1]]])
    assert one.layers[0].explained.mean == pytest.approx(other.layers[0].explained.mean, abs=1e-5)
    assert one.layers[0].kkt.mean == pytest.approx(other.layers[0].kkt.mean, abs=1e-5)


def test_it_can_be_printed_and_needs_a_primal_layer():
    text = str(duality(layer_of("static"), tokens()))
    assert "best possible" in text
    assert "static" in text
    with pytest.raises(ValueError, match="model: SoftmaxAttention has no Primal layer"):
        duality(build_attention("softmax", 6, 2), torch.randn(1, 3, 6))
    with pytest.raises(ValueError, match="data: no Primal layer"):
        duality(layer_of("static"), [])
