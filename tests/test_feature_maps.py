import math

import pytest
import torch
from torch import nn

from primal_attention import PrimalAttention, build_attention, ksvd_loss
from primal_attention.feature_maps import (
    FIXED_MAPS,
    ExponentialFeatureMap,
    FeatureMap,
    feature_map_pair,
    normaliser,
)
from primal_attention.ops.op import fused_ops
from primal_attention.ops.primal import moment

B, H, N, C, P = 2, 3, 23, 5, 11
HALVES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_finite(tensor):
    assert tensor.isfinite().all(), tensor


TEXTBOOK = {
    "cosine": lambda z: z / torch.linalg.vector_norm(z, dim=-1, keepdim=True),
    "elu": lambda z: nn.functional.elu(z) + 1,
    "unit_elu": lambda z: nn.functional.normalize(nn.functional.elu(z) + 1, dim=-1, eps=0.0),
    "relu": nn.functional.relu,
    "identity": lambda z: z,
}


@pytest.fixture(params=sorted(TEXTBOOK))
def name(request):
    return request.param


def test_there_are_no_other_fixed_maps():
    assert sorted(FIXED_MAPS) == sorted(TEXTBOOK)


def test_values_are_those_of_the_textbook(name):
    z = 2 * randn(B, N, H, C)
    assert_close(FIXED_MAPS[name](z), TEXTBOOK[name](z))


def test_gradients_are_those_of_the_textbook(name):
    z, dphi = (2 * randn(B, N, H, C)).requires_grad_(), randn(B, N, H, C, seed=1)
    found, expected = (
        torch.autograd.grad(function(z), z, dphi) for function in (FIXED_MAPS[name], TEXTBOOK[name])
    )
    assert_close(found, expected)


def test_unit_elu_far_below_zero_has_the_direction_of_exponentials():
    z = (randn(N, C) - 1000.0).requires_grad_()
    phi, expected = FIXED_MAPS["unit_elu"](z), nn.functional.normalize((z + 1000.0).exp(), dim=-1)
    assert_close(phi, expected)
    weights = randn(N, C, seed=1)
    found, expected = (torch.autograd.grad(each, z, weights) for each in (phi, expected))
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_cosine_of_a_zero_vector_is_zero_with_zero_gradient(dtype):
    z = torch.zeros(2, C, dtype=dtype)
    z[1] = randn(C, dtype=dtype)  # its neighbour is an ordinary vector
    z.requires_grad_()
    phi = FIXED_MAPS["cosine"](z)
    (gradient,) = torch.autograd.grad(phi, z, torch.ones_like(phi))
    assert phi[0].abs().sum() == 0
    assert gradient[0].abs().sum() == 0
    assert phi[1].double().norm().sub(1).abs() < 0.02
    assert (gradient[1] != 0).any()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosine_of_tiny_and_huge_vectors_is_a_finite_unit_vector(scale, dtype):
    direction = randn(N, C, dtype=dtype)
    z = (direction * scale).requires_grad_()
    phi = FIXED_MAPS["cosine"](z)
    (gradient,) = torch.autograd.grad(phi, z, torch.ones_like(phi))
    assert_finite(gradient)
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(phi.double(), TEXTBOOK["cosine"](direction.double()), tolerance)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1e30])
def test_cosine_is_finite_where_squares_leave_the_range(scale):
    z = (randn(N, C, dtype=torch.float32) * scale).requires_grad_()
    phi = FIXED_MAPS["cosine"](z)
    (gradient,) = torch.autograd.grad(phi, z, torch.ones_like(phi))
    for tensor in (phi, gradient):
        assert_finite(tensor)
    assert phi.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("z", [-1e4, 1e4])
def test_elu_and_relu_are_finite_far_from_zero(z):
    for name in ("elu", "relu"):
        at = torch.full((1, C), z, requires_grad=True)
        phi = FIXED_MAPS[name](at)
        (gradient,) = torch.autograd.grad(phi.sum(), at)
        assert_finite(phi)
        assert_finite(gradient)
        assert_close(gradient, torch.full((1, C), float(z > 0)))


def textbook_exponential(feature_map, z):
    """exp(w^T z - |z|^2 / 2) / sqrt(P) with z divided by C^(1/4), feature by feature."""
    z = z / z.shape[-1] ** 0.25
    half_norm = z.square().sum(-1) / 2
    P = feature_map.feature_dim
    directions = feature_map.projection.to(z.dtype)
    columns = [(torch.exp(z @ w - half_norm) + feature_map.eps) / math.sqrt(P) for w in directions]
    return torch.stack(columns, dim=-1)


def test_exponential_features_are_positive_and_those_of_the_formula():
    torch.manual_seed(0)
    feature_map = ExponentialFeatureMap(C, P).double()
    z = randn(B, N, H, C)
    phi = feature_map(z)
    assert phi.shape == (B, N, H, P)
    assert (phi > 0).all()
    assert_close(phi, textbook_exponential(feature_map, z))


def test_exponential_features_estimate_the_softmax_kernel_without_bias():
    # The mean over 400 maps of 200 features. The standard error of each entry is estimated from
    # the draws themselves; the bound is 6 of them, plus what eps adds.
    torch.manual_seed(0)
    q, k = randn(7, C) / 2, randn(7, C, seed=1) / 2
    expected = torch.exp(q @ k.T / math.sqrt(C))
    maps = [ExponentialFeatureMap(C, 200).double() for _ in range(400)]
    draws = torch.stack([feature_map(q) @ feature_map(k).T for feature_map in maps])
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert (standard_error / expected).max() < 0.02, "too noisy to tell a wrong kernel"
    errors = (draws.mean(0) - expected).abs() / (standard_error + 1e-5)
    assert errors.max() < 6, f"{errors.max():.1f} standard errors"
    wrong = torch.exp(q @ k.T)  # without the 1 / sqrt(C) of the softmax
    assert ((draws.mean(0) - wrong).abs() > 6 * standard_error).any()


def test_random_directions_have_mean_zero():
    # Each w_i is N(0, I); the Q of a QR decomposition alone is not uniform, its signs are fixed.
    torch.manual_seed(0)
    draws = torch.stack([ExponentialFeatureMap(C).projection for _ in range(3000)])
    assert draws.mean(0).abs().max() < 6 / math.sqrt(len(draws))


def test_random_directions_are_orthogonal_in_blocks_with_normal_lengths():
    torch.manual_seed(0)
    projection = ExponentialFeatureMap(C, 3 * C + 2).double().projection
    for block in projection.split(C):
        products = block @ block.T
        off_diagonal = products - torch.diag(products.diagonal())
        assert off_diagonal.abs().max() < 1e-5
    across = projection[:C] @ projection[C : 2 * C].T
    assert across.abs().max() > 0.1
    lengths = torch.cat([ExponentialFeatureMap(C, 997).projection for _ in range(20)])
    mean_square = lengths.square().sum(-1).mean()  # that of C normal variables: C
    assert abs(mean_square - C) < 6 * math.sqrt(2 * C / len(lengths))


def test_redraw_changes_the_directions_and_the_state_dict_keeps_them():
    feature_map = ExponentialFeatureMap(C)
    before = feature_map.projection.clone()
    feature_map.redraw()
    assert not torch.equal(before, feature_map.projection)
    other = ExponentialFeatureMap(C)
    other.load_state_dict(feature_map.state_dict())
    assert torch.equal(other(randn(3, C)), feature_map(randn(3, C)))


def test_normaliser_is_the_row_sum_of_the_dense_kernel_matrix():
    torch.manual_seed(0)
    feature_map = ExponentialFeatureMap(C, P).double()
    phi_q, phi_k = feature_map(randn(B, N, H, C)), feature_map(randn(B, N, H, C, seed=1))
    d_hat = normaliser(phi_q, phi_k.sum(1, keepdim=True))
    dense = torch.stack(
        [
            torch.stack([(phi_q[b, :, h] @ phi_k[b, :, h].T).sum(-1) for h in range(H)], dim=-1)
            for b in range(B)
        ]
    )
    assert_close(d_hat[..., 0], dense)


def test_normaliser_is_one_where_no_key_is_seen():
    phi_q = torch.ones(B, N, H, P)
    assert_close(normaliser(phi_q, torch.zeros(B, 1, H, P)), torch.ones(B, N, H, 1))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_exponential_features_of_any_size_are_finite(dtype, scale):
    torch.manual_seed(0)
    feature_map = ExponentialFeatureMap(C)
    z = (randn(N, C) * scale).to(dtype).requires_grad_()
    phi = feature_map(z)
    assert phi.dtype == torch.float32
    d_hat = normaliser(phi, phi.sum(0, keepdim=True))
    scores = phi * d_hat.rsqrt()
    (gradient,) = torch.autograd.grad(scores.sum(), z)
    for tensor in (phi, scores, gradient):
        assert_finite(tensor)
    assert (d_hat > 0).all()
    if scale == 0:
        expected = torch.full_like(phi, (1 + feature_map.eps) / math.sqrt(C))
        assert_close(phi, expected, 1e-6)


def test_a_pair_maps_queries_and_keys_each_in_its_own_way():
    assert feature_map_pair("elu", C) == ["elu"]
    assert feature_map_pair(("elu", "relu"), C) == ["elu", "relu"]
    queries, keys = ExponentialFeatureMap(C, P), ExponentialFeatureMap(C, P)
    assert feature_map_pair([queries, keys], C) == [queries, keys]


def test_the_layer_uses_the_first_map_for_queries_and_the_second_for_keys():
    torch.manual_seed(0)
    layer = PrimalAttention(H * C, H, 7, weights="static", feature_map=("elu", "cosine")).double()
    x = randn(B, N, H * C)
    q = layer.q_proj(x).view(B, N, H, C)
    k = layer.k_proj(x).view(B, N, H, C)
    c_e, c_r = layer.score_proj.weight.T.split(7)
    e = torch.einsum("bnhc,hcs->bnhs", TEXTBOOK["elu"](q), layer.w_e)
    r = torch.einsum("bnhc,hcs->bnhs", TEXTBOOK["cosine"](k), layer.w_r)
    heads = e @ c_e + r @ c_r + layer.score_proj.bias
    assert_close(layer(x), layer.out_proj(heads.flatten(2)), 1e-10)


class Doubled(FeatureMap):
    """A user's own map, with twice as many features as dimensions and no normaliser."""

    def __init__(self, head_dim, feature_dim):
        super().__init__()
        self.head_dim, self.feature_dim = head_dim, feature_dim

    def forward(self, z):
        return torch.cat([z, -z], dim=-1).relu()


@pytest.mark.parametrize("spec", ["softmax", "", ("cosine", "gauss")])
def test_unknown_names_are_refused(spec):
    with pytest.raises(
        ValueError, match=r"feature_map must be one of .*cosine.*got '(softmax||gauss)'"
    ):
        feature_map_pair(spec, C)


def test_pairs_that_do_not_fit_are_refused():
    exponential = ExponentialFeatureMap(C, P)
    with pytest.raises(ValueError, match=r"feature_map.*head_dim 5.*has 7"):
        feature_map_pair(exponential, 7)
    with pytest.raises(ValueError, match=r"feature_map.*one size.*11 and 13"):
        feature_map_pair((exponential, ExponentialFeatureMap(C, 13)), C)
    with pytest.raises(ValueError, match=r"feature_map.*one size.*10 and 5"):
        feature_map_pair((Doubled(C, 2 * C), "cosine"), C)
    with pytest.raises(ValueError, match=r"feature_map: a normalised map.*exponential.*cosine"):
        feature_map_pair(("exponential", "cosine"), C)
    with pytest.raises(ValueError, match=r"feature_map.*one map or a pair.*got \(.elu"):
        feature_map_pair(("elu", "elu", "elu"), C)
    with pytest.raises(ValueError, match=r"feature_map.*one map or a pair.*got \(\)"):
        feature_map_pair((), C)


@pytest.mark.parametrize("sizes", [(0, None), (-1, None), (C, -3)])
def test_exponential_sizes_must_be_positive(sizes):
    with pytest.raises(
        ValueError, match=r"(head_dim|num_features) must be at least 1, got (0|-1|-3)"
    ):
        ExponentialFeatureMap(*sizes)


def test_zero_random_features_are_refused():
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        ExponentialFeatureMap(C, 0)


@pytest.fixture
def softplus(monkeypatch):
    """A map that is added as docs/extend.md says; no fused op has it."""
    name = "softplus"
    monkeypatch.setitem(FIXED_MAPS, name, nn.functional.softplus)
    return name


@pytest.fixture
def other_cosine(monkeypatch):
    """Another map under a name of the library."""
    monkeypatch.setitem(FIXED_MAPS, "cosine", nn.functional.softplus)
    return "cosine"


class Softplus(FeatureMap):
    """The same map as a module, whose derivative is PyTorch's."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = self.feature_dim = head_dim

    def forward(self, z):
        return nn.functional.softplus(z)


LAYERS = [
    *(
        ("primal", {"num_directions": 3, "weights": weights, "causal": causal})
        for weights, causal in [
            ("sampled", False),
            ("static", False),
            ("static", True),
            ("dual", False),
            ("dual", True),
        ]
    ),
    ("linear", {}),
    ("linear", {"causal": True}),
    ("linear_bn", {}),
]


def outputs_and_gradients(layer, x, **inputs):
    out = layer(x, **inputs)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    if isinstance(layer, PrimalAttention) and layer.training:
        loss = loss + ksvd_loss(layer, objective="released")
    tensors = [x, *layer.parameters()]
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [out, *(torch.zeros(()) if d is None else d for d in found)]


def check_added_map(name, mechanism, options, *, dim=12, shape=(2, 9), dtype=torch.float64):
    mask = torch.ones(shape, dtype=torch.bool)
    mask[-1, 1::3] = False
    x = randn(*shape, dim, dtype=dtype).requires_grad_()
    for pair in (False, True):
        built = []
        for spec in (name, Softplus(dim // H)):
            torch.manual_seed(0)
            spec = [spec, "elu"] if pair else spec
            layer = build_attention(mechanism, dim, H, feature_map=spec, **options)
            built.append(layer.to(dtype))
        for training in (False, True):
            for token_mask in (None, mask):
                results = (
                    outputs_and_gradients(layer.train(training), x, token_mask=token_mask)
                    for layer in built
                )
                for one, other in zip(*results, strict=True):
                    assert_close(one, other, 1e-9 if dtype == torch.float64 else 2e-3)


@pytest.mark.parametrize(("mechanism", "options"), LAYERS)
def test_an_added_map_is_right_in_every_layer(softplus, mechanism, options):
    check_added_map(softplus, mechanism, options)


@pytest.mark.parametrize(("mechanism", "options"), LAYERS)
def test_a_replaced_map_is_right_in_every_layer(other_cosine, mechanism, options):
    check_added_map(other_cosine, mechanism, options)


@pytest.mark.parametrize("causal", [False, True])
def test_an_added_map_is_right_in_large_layers(softplus, causal):
    options = {"num_directions": 8, "weights": "static", "causal": causal}
    shape = (2, 512)
    check_added_map(softplus, "primal", options, dim=132, shape=shape, dtype=torch.float32)


def test_a_map_that_no_fused_op_has_is_left_to_pytorch(softplus):
    pytest.importorskip("triton")
    z, values = randn(3, 2, 17, 16), randn(3, 2, 17, 5, seed=1)
    with fused_ops("always"):
        single = moment(z.float(), values.float(), (softplus,), None)
    assert_close(single.double(), moment(z, values, (softplus,), None), 1e-4)
