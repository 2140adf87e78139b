"""At the exact singular value decomposition the objectives are what the theory says."""

import pytest
import torch

from primal_attention import PrimalAttention
from primal_attention.theory.ksvd import best_unexplained_energy, stationary_point

from .cases import C, D, H, S, assert_near, loss_of, make_inputs, make_layer
from .definition import features, heads, layer_objective, run, runs

n, t = 7, 5  # at most D, so that a linear map of the tokens can have any value at each of them


def set_to_solution(layer, x, *, released=False):
    """Give each head the leading triplets of its kernel; return what they leave unexplained."""
    phi_q, phi_k = features(layer, x)
    lambdas, best = [], []
    for h in range(H):
        f_x = None
        if layer.weights == "sampled":
            M = layer.w_e.shape[1]
            index = torch.arange(M) * (len(x) - 1) // (M - 1)
            f_x = heads(x[index], H)[h]
        point = stationary_point(phi_q[h], phi_k[h], S, f_x)
        with torch.no_grad():
            layer.w_e[h], layer.w_r[h] = point.w_e, point.w_r
        lambdas.append(point.lambda_diag)
        kernel_matrix = run(layer, x).kernel_matrix[h]
        best.append(best_unexplained_energy(torch.linalg.svdvals(kernel_matrix), S))
    lambda_diag = torch.stack(lambdas)
    layer.lambda_diag = (len(x) * lambda_diag).sqrt() if released else lambda_diag
    return torch.stack(best).mean()


@pytest.mark.parametrize("kind", ["static", "static causal", "sampled"])
def test_parameters_at_the_solution(kind):
    layer, x = make_layer(kind), make_inputs(kind).x[0].detach()
    best = set_to_solution(layer, x)
    layer(x[None])
    assert loss_of(layer, "zero") < 1e-20
    assert_near(loss_of(layer, "explained_energy"), best)
    # J = 0 is not what the released form is then: it has Lambda^2, and the mean over tokens.
    assert loss_of(layer, "released") > 0.1


@pytest.mark.parametrize("objective", ["released", "released_batch"])
@pytest.mark.parametrize("kind", ["static", "static causal", "sampled"])
def test_released_objectives_are_zero_where_their_lambda_squared_is_n_lambda(kind, objective):
    layer, x = make_layer(kind), make_inputs(kind).x[0].detach()
    set_to_solution(layer, x, released=True)
    layer(x[None])
    assert loss_of(layer, objective) < 1e-20


@pytest.mark.parametrize("crossing", [False, True], ids=["self", "cross"])
def test_dual_variables_at_the_solution(crossing):
    """H_e, H_r the singular vectors times sqrt(n), Lambda = n / sigma (sqrt(n t) for t keys)."""
    torch.manual_seed(0)
    layer = PrimalAttention(D, H, S, weights="dual", bias=False).double()
    x = torch.randn(n, D, dtype=torch.float64)
    source = torch.randn(t, D, dtype=torch.float64) if crossing else x
    kernel_matrix = run(layer, x, source).kernel_matrix.detach()  # [H, n, t]
    left, sigma, right_t = torch.linalg.svd(kernel_matrix, full_matrices=False)
    h_e = left[:, :, :S].transpose(0, 1).flatten(1) * len(x) ** 0.5  # [n, H S]
    h_r = right_t.mT[:, :, :S].transpose(0, 1).flatten(1) * len(source) ** 0.5
    with torch.no_grad():
        weight_e, weight_r = layer.h_proj.weight.chunk(2)
        weight_e.copy_((torch.linalg.pinv(x) @ h_e).T)
        weight_r.copy_((torch.linalg.pinv(source) @ h_r).T)
    layer.lambda_diag = (len(x) * len(source)) ** 0.5 / sigma[:, :S]

    layer(x[None], source[None] if crossing else None)
    assert loss_of(layer, "zero") < 1e-20
    best = torch.stack([best_unexplained_energy(values, S) for values in sigma[:, :C]]).mean()
    assert 0 < best < 1
    assert_near(loss_of(layer, "explained_energy"), best)


def test_solution_is_stationary_for_the_explained_energy():
    layer, x = make_layer("static"), make_inputs().x[0].detach()
    set_to_solution(layer, x)
    layer(x[None])
    loss_of(layer, "explained_energy").backward()
    for parameter in (layer.w_e, layer.w_r, layer.raw_lambda):
        assert_near(parameter.grad, torch.zeros_like(parameter))


def test_one_solution_does_not_fit_another_sequence():
    """Weights shared by sequences stay above the best of each."""
    layer, inputs = make_layer("static"), make_inputs(masked=False)
    best = set_to_solution(layer, inputs.x[0].detach())
    layer(inputs.x)
    shared = loss_of(layer, "explained_energy")
    assert_near(shared, layer_objective(runs(layer, inputs.x), "explained_energy"))
    assert shared > best
