"""Construction, initial values, dtypes, copies and sizes at the edge."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from primal_attention import ATTENTIONS, PrimalAttention, build_attention, ksvd_loss

from .dense import B, C, D, H, N, S, assert_close, build, randn

FORMS = [
    {"weights": "static"},
    {"weights": "sampled"},
    {"weights": "dual"},
    {"weights": "static", "causal": True},
    {"weights": "dual", "causal": True},
    {"weights": "sampled", "feature_map": "exponential"},
]


@pytest.fixture(params=FORMS, ids=str)
def form(request):
    return request.param


def test_parameters_have_the_names_and_shapes_of_the_contract(form):
    shapes = {name: tuple(p.shape) for name, p in build(**form).named_parameters()}
    rows = 3 * S if form["weights"] == "sampled" else C
    expected = {"raw_lambda": (H, S)}
    for name in ("q_proj", "k_proj", "out_proj"):
        expected |= {f"{name}.weight": (D, D), f"{name}.bias": (D,)}
    expected |= {"score_proj.weight": (C, 2 * S), "score_proj.bias": (C,)}
    if form["weights"] == "dual":
        expected |= {"h_proj.weight": (2 * H * S, D), "h_proj.bias": (2 * H * S,)}
    else:
        expected |= {"w_e": (H, rows, S), "w_r": (H, rows, S)}
    assert shapes == expected


@pytest.mark.parametrize("scores", ["e", "r"])
def test_one_sided_layers_keep_both_sides_as_parameters(scores):
    layer = build(scores=scores, bias=False)
    assert layer.score_proj.weight.shape == (C, S)
    assert layer.w_e.shape == layer.w_r.shape
    assert not [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    layer(randn(B, N, D))
    ksvd_loss(layer).backward()
    assert layer.w_e.grad.any()
    assert layer.w_r.grad.any()
    assert layer.q_proj.weight.grad.any()
    assert layer.k_proj.weight.grad.any()


def test_defaults_are_those_of_the_paper():
    layer = PrimalAttention(64, 4)
    assert (layer.num_directions, layer.weights, layer.scores) == (32, "sampled", "both")
    assert layer.num_landmarks == 320
    assert not layer.causal
    assert PrimalAttention(64, 4, 20, max_tokens=7).num_landmarks == 7
    assert PrimalAttention(64, 4, 20, max_tokens=201).num_landmarks == 200


@pytest.mark.parametrize("weights", ["static", "sampled"])
def test_projection_weights_start_orthogonal_over_the_heads(weights):
    """Start as released: the 3-D tensor flattened to [H, M S]; Frobenius norm 1 a head."""
    layer = build(weights=weights)
    for w in (layer.w_e, layer.w_r):
        flat = w.detach().flatten(1)
        assert_close(flat @ flat.T, torch.eye(H, dtype=w.dtype), 1e-6)
    assert not torch.equal(layer.w_e, layer.w_r)


def test_lambda_starts_uniform_between_0_and_1():
    torch.manual_seed(0)
    values = PrimalAttention(8, 8, 500, weights="static").lambda_diag.detach().flatten()
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 6 * (1 / 12 / len(values)) ** 0.5
    for edge in (0.1, 0.5, 0.9):
        share = (values < edge).double().mean()
        assert abs(share - edge) < 6 * (edge * (1 - edge) / len(values)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lambda_can_be_set(dtype):
    layer = build(dtype=dtype)
    value = torch.linspace(1e-4, 50, H * S, dtype=dtype).view(H, S)
    layer.lambda_diag = value
    assert_close(layer.lambda_diag.detach(), value, 1e-5 if dtype == torch.float32 else 1e-10)
    assert_close(nn.functional.softplus(layer.raw_lambda.detach()), value, 1e-5)
    assert isinstance(layer.raw_lambda, nn.Parameter)
    assert layer.raw_lambda.requires_grad
    layer.lambda_diag = torch.zeros(H, S, dtype=dtype)
    assert layer.lambda_diag.isfinite().all()
    assert (layer.lambda_diag >= 0).all()
    assert layer.lambda_diag.max() < 1e-6


def test_lambda_of_the_wrong_shape_or_sign_is_refused():
    layer = build()
    before = layer.raw_lambda.detach().clone()
    with pytest.raises(ValueError, match=r"lambda_diag .*\[3, 7\].*got \[7\]"):
        layer.lambda_diag = torch.ones(S)
    with pytest.raises(ValueError, match=r"lambda_diag .*negative.*-0\.5"):
        layer.lambda_diag = torch.full((H, S), -0.5)
    with pytest.raises(ValueError, match=r"lambda_diag .*nan"):
        layer.lambda_diag = torch.full((H, S), float("nan"))
    assert torch.equal(layer.raw_lambda, before)


@pytest.mark.parametrize("length", [1, 2, 3 * S - 1, 3 * S, 97])
def test_any_number_of_tokens(form, length):
    layer = build(**form)
    x = randn(B, length, D).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    (y.square().sum() + ksvd_loss(layer)).backward()
    assert x.grad.isfinite().all()


def test_a_batch_without_sequences(form):
    layer = build(**form)
    x = randn(0, N, D).requires_grad_()
    assert layer(x).shape == (0, N, D)
    mask = torch.ones(0, N, dtype=torch.bool)
    y = layer(x, token_mask=mask)
    (y.sum() + ksvd_loss(layer)).backward()
    for parameter in layer.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype(form, dtype):
    exact = build(**form).train()
    layer = copy.deepcopy(exact).to(dtype)
    x = randn(B, N, D, dtype=dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    loss = y.square().mean() + ksvd_loss(layer)
    assert loss.isfinite()
    loss.backward()
    for tensor in (x.grad, *(p.grad for p in layer.parameters())):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
    want = exact.double()(x.detach().double())
    error = (y.double() - want).norm() / want.norm()
    assert error < 16 * torch.finfo(dtype).eps


def test_a_copy_starts_without_statistics(form):
    layer = build(**form).train()
    x = randn(B, N, D).requires_grad_()
    layer(x)
    assert len(layer.passes.runs) == 1
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert twin.passes.runs == []
        assert twin.state_dict().keys() == layer.state_dict().keys()
        assert torch.equal(twin.eval()(x), layer.eval()(x))
    assert len(layer.passes.runs) == 1, "copying does not take them from the original"


def test_the_state_dict_round_trip(form):
    layer, other = build(**form, seed=0), build(**form, seed=1)
    x = randn(B, N, D)
    assert not torch.equal(layer.eval()(x), other.eval()(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


def test_construction_on_the_meta_device(form):
    options = {"samples_per_direction": 3} | form
    with torch.device("meta"):
        layer = PrimalAttention(D, H, S, **options)
    assert all(p.is_meta for p in layer.parameters())
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():  # what fresh memory holds is up to chance
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert (layer.lambda_diag > 0).all()
    assert (layer.lambda_diag < 1).all()
    if form["weights"] != "dual":
        assert_close(layer.w_e.detach().flatten(1).norm(dim=1), torch.ones(H), 1e-5)
    for name, tensor in layer.state_dict().items():
        assert tensor.isfinite().all(), f"{name} was never drawn"
    assert layer(torch.randn(B, N, D)).isfinite().all()


def test_the_registry_builds_the_layer():
    assert ATTENTIONS["primal"] is PrimalAttention
    layer = build_attention("primal", D, H, num_directions=S, weights="dual", causal=True)
    assert isinstance(layer, PrimalAttention)
    assert (layer.dim, layer.num_heads, layer.num_directions) == (D, H, S)
    assert layer.weights == "dual"
    assert "dual" in repr(layer)
