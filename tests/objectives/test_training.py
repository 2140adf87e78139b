"""What minimising an objective does to one layer: only the explained energy finds the SVD."""

import pytest
import torch

from primal_attention import PrimalAttention
from primal_attention.theory.ksvd import best_unexplained_energy

from .cases import loss_of
from .definition import layer_objective, runs

N, D, S = 256, 32, 10


@pytest.fixture
def layer():
    """One head whose directions and Lambda alone are trained."""
    torch.manual_seed(0)
    layer = PrimalAttention(D, 1, S, weights="static", bias=False).double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in ("w_e", "w_r", "raw_lambda"))
    for projection in (layer.q_proj, layer.k_proj):
        torch.nn.init.orthogonal_(projection.weight)
    return layer


@pytest.fixture
def x():
    """Tokens whose channels matter less and less, so that directions are worth choosing."""
    torch.manual_seed(1)
    return torch.randn(1, N, D, dtype=torch.float64) * torch.linspace(2, 0.2, D)


def minimise(layer, x, objective, num_steps, lr):
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        layer(x)
        loss_of(layer, objective).backward()
        optimizer.step()
        schedule.step()
    taken = runs(layer, x)
    measured = {name: layer_objective(taken, name).item() for name in ("zero", "explained_energy")}
    singular_values = torch.linalg.svdvals(taken[0].kernel_matrix[0].detach())
    return measured, best_unexplained_energy(singular_values, S).item()


def test_explained_energy_reaches_the_best_possible(layer, x):
    measured, best = minimise(layer, x, "explained_energy", num_steps=800, lr=3e-2)
    assert 0.1 < best < 0.4
    assert -1e-12 < measured["explained_energy"] - best < 1e-3


def test_zero_is_reached_with_almost_everything_unexplained(layer, x):
    measured, best = minimise(layer, x, "zero", num_steps=800, lr=1e-2)
    assert measured["zero"] < 1e-10
    assert measured["explained_energy"] > 0.9
    assert best < 0.4
