"""On a CPU an output projection that maps the scores, with the maps of the heads in it."""

import pytest
import torch
from torch import nn

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.attention import packing
from primal_attention.attention.statistics import Grams, Scored

B, N, D, H, S = 2, 17, 33, 3, 5

KINDS = {
    "sampled": {"weights": "sampled", "samples_per_direction": 2},
    "static": {"weights": "static"},
    "causal": {"weights": "static", "causal": True},
}
OBJECTIVES = ["zero", "released", "released_batch", "explained_energy"]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every input counts as a large one."""
    monkeypatch.setattr(packing, "is_work_of_cpu", lambda x, weight: True)


def made(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = PrimalAttention(D, H, S, **options).to(dtype).train()
    return layer, torch.randn(B, N, D, dtype=torch.float64).to(dtype).requires_grad_()


def step(layer, x, objective="released", **masks):
    """Outputs, the objective, and gradients of the tokens and parameters."""
    y = layer(x, **masks)
    penalty = ksvd_loss(layer, objective=objective)
    loss = y.square().sum() + 3 * penalty
    grads = torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)
    return [y, penalty, *grads]


def maps_scores(layer, x):
    layer(x)
    return isinstance(layer.ksvd_runs[-1].sums, Scored)


def assert_agrees_with_outputs_of_heads(monkeypatch, layer, x, objective, tolerance=1e-9, **masks):
    assert maps_scores(layer, x)
    got = step(layer, x, objective, **masks)
    monkeypatch.setattr(packing, "is_work_of_cpu", lambda x, weight: False)
    assert not maps_scores(layer, x)
    for one, other in zip(got, step(layer, x, objective, **masks), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature_map", ["cosine", ("elu", "relu")])
def test_nothing_else_changes(monkeypatch, kind, feature_map, objective, masked):
    layer, x = made(**KINDS[kind], feature_map=feature_map)
    mask = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    assert_agrees_with_outputs_of_heads(monkeypatch, layer, x, objective, token_mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_without_biases(monkeypatch, kind):
    layer, x = made(**KINDS[kind], bias=False)
    assert_agrees_with_outputs_of_heads(monkeypatch, layer, x, "released")


def test_in_float32(monkeypatch):
    layer, x = made(torch.float32)
    assert_agrees_with_outputs_of_heads(monkeypatch, layer, x, "released", 1e-4)


def test_evaluation_and_training_agree():
    layer, x = made()
    trained = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained, rtol=1e-10, atol=1e-10)


def test_padding_reaches_nothing():
    layer, x = made()
    mask = torch.arange(N) < torch.tensor([[N], [N - 6]])
    poisoned = torch.where(mask[:, :, None], x.detach(), float("nan")).requires_grad_()
    results = step(layer, x, token_mask=mask), step(layer, poisoned, token_mask=mask)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert not results[0][0][~mask].any()


def test_gram_matrices_can_be_had_afterwards(monkeypatch):
    layer, x = made()
    assert maps_scores(layer, x)
    grams = layer.ksvd_runs[-1].grams
    monkeypatch.setattr(packing, "is_work_of_cpu", lambda x, weight: False)
    layer(x)
    run = layer.ksvd_runs[-1]
    assert isinstance(run.sums, Grams)
    for one, other in zip(grams, run.sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Doubled(nn.Linear):
    """What an adapter or a quantised layer is to us: something else than nn.Linear."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["score_proj", "out_proj"])
def test_modules_that_must_be_called_are(name):
    layer, x = made()
    plain = getattr(layer, name)
    other = Doubled(plain.in_features, plain.out_features).double()
    other.load_state_dict(plain.state_dict())
    setattr(layer, name, other)
    assert not maps_scores(layer, x)


def test_a_hook_of_the_output_projection_is_called():
    layer, x = made()
    seen = []
    layer.out_proj.register_forward_hook(lambda *given: seen.append(given))
    assert not maps_scores(layer, x) and seen


@pytest.mark.parametrize(
    "options", [{"scores": "e"}, {"weights": "dual"}, {"num_directions": 6}], ids=str
)
def test_where_there_is_nothing_to_gain(options):
    directions = options.pop("num_directions", S)
    layer = PrimalAttention(D, H, directions, **options).train()
    assert not maps_scores(layer, torch.randn(B, N, D))


def test_small_inputs_go_the_usual_way(monkeypatch):
    monkeypatch.undo()
    layer, x = made(torch.float32)
    assert not maps_scores(layer, x)


def test_large_inputs_go_this_way_by_themselves(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(0)
    layer, x = PrimalAttention(256, 4, 32, max_tokens=31).train(), torch.randn(1, 4099, 256)
    assert maps_scores(layer, x)
    got = step(layer, x.requires_grad_())
    want = step(layer.double(), x.detach().double().requires_grad_())
    assert not maps_scores(layer, x.double())
    for one, other in zip(got, want, strict=True):
        scale = other.abs().max().clamp(min=1).item()
        torch.testing.assert_close(one / scale, (other / scale).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_of_gradients(objective):
    layer, x = made()
    y = layer(x)
    loss = y.square().mean() + ksvd_loss(layer, objective=objective)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    layer.zero_grad()
    dx.square().sum().backward()
    assert layer.w_e.grad.isfinite().all() and layer.w_e.grad.any()
