import pytest
import torch

from primal_attention import ksvd_loss
from primal_attention.feature_maps import ExponentialFeatureMap, FeatureMap

from .dense import (
    MASKS,
    B,
    C,
    D,
    H,
    N,
    S,
    assert_close,
    assert_same_with_gradients,
    build,
    dense,
    dense_run,
    landmarks,
    randn,
    released_j,
)

MAPS = ["cosine", "elu", "relu", "identity", "exponential"]
PAIRS = [("elu", "cosine"), ("relu", "identity")]
FORMS = [
    {"weights": "static"},
    {"weights": "sampled"},
    {"weights": "dual"},
    {"weights": "static", "causal": True},
    {"weights": "dual", "causal": True},
]


def name_of(form):
    return form["weights"] + (" causal" if form.get("causal") else "")


@pytest.fixture(params=FORMS, ids=name_of)
def form(request):
    return request.param


def compare(layer, mask, length=N):
    x = randn(B, length, D).requires_grad_()
    got = layer(x, token_mask=mask)
    assert_same_with_gradients(layer, got, dense(layer, x, mask), [x])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", [*MAPS, *PAIRS], ids=str)
def test_the_layer_is_the_paper(form, feature_map, mask):
    compare(build(**form, feature_map=feature_map), MASKS[mask])


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_side_of_the_scores(form, scores, bias, mask):
    compare(build(**form, scores=scores, bias=bias), MASKS[mask])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_tokens(form, length):
    """Fewer than landmarks: some of them are then the same token."""
    compare(build(**form), None, length)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 1000])
def test_max_tokens_bounds_the_landmarks_and_not_the_length(max_tokens):
    layer = build(weights="sampled", max_tokens=max_tokens)
    assert layer.num_landmarks == min(max_tokens, 3 * S)
    assert layer.w_e.shape == layer.w_r.shape == (H, min(max_tokens, 3 * S), S)
    compare(layer, MASKS["holes"])


def test_two_random_maps_and_more_features_than_dimensions():
    torch.manual_seed(0)
    pair = (ExponentialFeatureMap(C, 11), ExponentialFeatureMap(C, 11))
    for options in (
        {"weights": "static"},
        {"weights": "dual"},
        {"weights": "dual", "causal": True},
    ):
        layer = build(**options, feature_map=pair)
        if options["weights"] == "static":
            assert layer.w_e.shape == (H, 11, S)
        compare(layer, MASKS["holes"])


class Shifted(FeatureMap):
    """A user's own map, without a normaliser."""

    def __init__(self):
        super().__init__()
        self.head_dim = self.feature_dim = C

    def forward(self, z):
        return z + 1


def test_a_users_own_map():
    layer, plain = build(feature_map=Shifted()), build(feature_map="identity")
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():  # z + 1 is what a bias that is 1 higher gives
        plain.q_proj.bias += 1
        plain.k_proj.bias += 1
    x = randn(B, N, D)
    assert_close(layer(x), plain(x))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("objective", ["released", "released_batch"])
def test_the_objective_of_a_training_pass_is_that_of_the_scores(form, objective, mask):
    layer = build(**form)
    x = randn(B, N, D).requires_grad_()
    layer(x, token_mask=MASKS[mask])
    got = ksvd_loss(layer, objective=objective)
    j = torch.stack([released_j(layer, s) for s in dense_run(layer, x, MASKS[mask])[1]])
    want = j.square().mean() if objective == "released" else j.mean().square()
    assert_same_with_gradients(layer, got, want, [x])


def test_a_static_layer_is_position_wise():
    layer = build(weights="static").eval()
    x = randn(B, N, D)
    want = layer(x)
    other = randn(B, N, D, seed=1)
    other[:, 7] = x[:, 7]
    assert torch.equal(layer(other)[:, 7], want[:, 7])
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    assert_close(layer(x[:, order]), want[:, order])


@pytest.mark.parametrize("options", [f for f in FORMS if f["weights"] != "static"], ids=name_of)
def test_the_other_forms_mix_tokens(options):
    layer = build(**options).eval()
    x = randn(B, N, D)
    other = x.clone()
    other[:, 0] += 1
    assert (layer(other)[:, 7] - layer(x)[:, 7]).abs().max() > 1e-6


@pytest.mark.parametrize("weights", ["static", "sampled"])
def test_weights_start_as_large_as_asked(weights):
    """And the part of the output that depends on the token with them; drawn in float32."""
    x, parts = randn(B, N, D), []
    for gain in (1.0, 7.0):
        layer = build(weights=weights, gain=gain).eval()
        for w in (layer.w_e, layer.w_r):
            assert_close(w.flatten(1).norm(dim=1), torch.full((H,), gain).double(), 1e-6)
        y = layer(x)
        parts.append(y - y.mean(1, keepdim=True))
    assert_close(parts[1], 7 * parts[0], 1e-6)


@pytest.mark.parametrize("option", ["landmark_dropout", "landmark_jitter"])
def test_landmarks_are_random_in_training_only(option):
    plain, layer = build(), build(**{option: 0.5})
    x = randn(B, 97, D)
    layer.eval()
    assert torch.equal(layer(x), plain.eval()(x))
    assert torch.equal(layer(x), layer(x))
    layer.train()
    first, second = layer(x), layer(x)
    assert (first - second).abs().max() > 1e-6


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_landmark_options_do_not_touch_forms_without_landmarks(weights):
    layer = build(weights=weights, landmark_dropout=0.5, landmark_jitter=1.0).train()
    x = randn(B, N, D)
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("options", [{"landmark_dropout": 0.5}, {"landmark_jitter": 1.0}], ids=str)
def test_the_heads_share_their_landmarks(options):
    """W_{e|X} of a head is X'^T w_e: with w_e one-hot, the statistics show which X' it took."""
    layer = build(**options, max_tokens=S).train()
    with torch.no_grad():
        layer.w_e.copy_(torch.eye(S).expand(H, S, S))
    number = torch.arange(1.0, 98.0, dtype=torch.float64)
    layer(number[None, :, None].expand(5, 97, D))  # every channel of token i holds i + 1
    taken = layer.passes.runs[-1].sums.weights[0]  # [B, H, P, S]
    assert_close(taken, taken[:, :1, :1].expand_as(taken))
    assert len({tuple(row) for row in taken[:, 0, 0].tolist()}) == 5, "sequences share a draw"
    regular = landmarks(number[:, None], S)[:, 0]
    assert (taken[:, 0, 0] != regular).any()
    if "landmark_dropout" in options:
        kept = taken[:, 0, 0] != 0
        assert_close(taken[:, 0, 0][kept], 2 * regular.expand(5, S)[kept], 1e-6)


def test_dropout_acts_on_outputs_in_training_only():
    layer = build(dropout=0.5)
    x = randn(B, N, D)
    want = layer.eval()(x)
    dropped = layer.train()(x)
    kept = dropped != 0
    assert 0.3 < kept.double().mean() < 0.7
    assert_close(dropped[kept], 2 * want[kept])


@pytest.mark.parametrize("feature_map", ["cosine", "exponential"])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_features_and_weights_give_the_outputs(form, feature_map, mask):
    layer, x = build(**form, feature_map=feature_map).eval(), randn(B, N, D)
    token_mask = MASKS[mask]
    if mask == "holes":
        x = torch.where(token_mask[..., None], x, torch.nan)
    given = layer.features_and_weights(x, token_mask=token_mask)
    w_e, w_r = given.w_e_given_x, given.w_r_given_x
    e, r = given.phi_q @ w_e, given.phi_k_at_x @ w_r
    if given.h is not None and layer.causal:  # outputs take means up to the token
        counts = torch.ones(B, N) if token_mask is None else token_mask.double()
        kernel = given.phi_q @ given.phi_k.mT / counts.cumsum(1).clamp(min=1)[:, None, :, None]
        e = kernel.tril() @ given.h[1]
        r = (given.phi_k @ given.phi_q.mT).tril() @ given.h[0]
        r = r / counts.cumsum(1).clamp(min=1)[:, None, :, None]
    heads = layer.score_proj(torch.cat((e, r), -1).transpose(1, 2))
    y = layer.out_proj(heads.flatten(-2))
    y = y if token_mask is None else torch.where(token_mask[..., None], y, 0.0)
    assert_close(layer(x, token_mask=token_mask), y)
    if given.h is not None and token_mask is None:
        assert_close(w_e, given.phi_k.mT @ given.h[1] / N)
        assert_close(w_r, given.phi_q.mT @ given.h[0] / N)


def test_features_and_weights_of_a_context():
    for weights in ("sampled", "dual"):
        layer, x, context = build(weights=weights).eval(), randn(B, N, D), randn(B, 5, D)
        given = layer.features_and_weights(x, context)
        assert given.phi_k.shape[2] == 5
        scores = given.phi_q @ given.w_e_given_x, given.phi_k_at_x @ given.w_r_given_x
        heads = layer.score_proj(torch.cat(scores, -1).transpose(1, 2))
        assert_close(layer(x, context), layer.out_proj(heads.flatten(-2)))
