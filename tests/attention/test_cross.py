"""Cross-attention: landmarks or dual variables of the keys' side come from the context."""

import pytest
import torch

from primal_attention import ksvd_loss

from .dense import (
    MASKS,
    B,
    D,
    H,
    N,
    S,
    assert_close,
    assert_same_with_gradients,
    build,
    dense,
    dense_run,
    masks,
    randn,
    released_j,
)

K = 13  # tokens of the context
CONTEXT_MASKS = masks(B, K)
FORMS = [
    {"weights": weights, "feature_map": feature_map}
    for weights in ("sampled", "dual")
    for feature_map in ("cosine", "elu", ("relu", "identity"))
]


@pytest.fixture(params=FORMS, ids=lambda form: f"{form['weights']} {form['feature_map']}")
def layer(request):
    return build(**request.param)


def inputs():
    return randn(B, N, D).requires_grad_(), randn(B, K, D, seed=1).requires_grad_()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("context_mask", CONTEXT_MASKS)
def test_the_layer_is_the_formula(layer, mask, context_mask):
    x, context = inputs()
    token_mask, key_mask = MASKS[mask], CONTEXT_MASKS[context_mask]
    got = layer(x, context, token_mask=token_mask, context_mask=key_mask)
    want = dense(layer, x, token_mask, context, key_mask)
    assert_same_with_gradients(layer, got, want, [x, context])


def test_dual_weights_come_from_both_sequences():
    """W_e = Phi_k(context)^T H_r(context) / n and W_r = Phi_q(x)^T H_e(x) / n, e and r at x."""
    layer = build(weights="dual")
    x, context = inputs()

    def heads(z):
        return z.view(*z.shape[:2], H, -1)

    def unit(z):
        return z / z.norm(dim=-1, keepdim=True)

    phi_q, phi_k = unit(heads(layer.q_proj(x))), unit(heads(layer.k_proj(x)))
    context_phi_k = unit(heads(layer.k_proj(context)))
    h_e = heads(layer.h_proj(x)[..., : H * S])
    h_r = heads(layer.h_proj(context)[..., H * S :])
    w_e = torch.einsum("bmhp,bmhs->bhps", context_phi_k, h_r) / K
    w_r = torch.einsum("bnhp,bnhs->bhps", phi_q, h_e) / N
    e = torch.einsum("bnhp,bhps->bnhs", phi_q, w_e)
    r = torch.einsum("bnhp,bhps->bnhs", phi_k, w_r)
    want = layer.out_proj(layer.score_proj(torch.cat([e, r], dim=-1)).flatten(2))
    assert_close(layer(x, context), want)


@pytest.mark.parametrize("feature_map", ["cosine", "exponential", ("elu", "relu")], ids=str)
@pytest.mark.parametrize("weights", ["sampled", "dual"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_to_itself_is_self_attention(weights, feature_map, mask):
    layer = build(weights=weights, feature_map=feature_map)
    x = randn(B, N, D).requires_grad_()
    token_mask = MASKS[mask]
    want = layer(x, token_mask=token_mask)
    want_loss = ksvd_loss(layer, objective="zero")
    got = layer(x, context=x, token_mask=token_mask, context_mask=token_mask)
    assert_same_with_gradients(layer, got, want, [x])
    assert_close(ksvd_loss(layer, objective="zero"), want_loss)


@pytest.mark.parametrize("context_mask", ["none", "holes"])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_the_objective_takes_queries_from_x_and_keys_from_the_context(layer, mask, context_mask):
    x, context = inputs()
    token_mask, key_mask = MASKS[mask], CONTEXT_MASKS[context_mask]
    layer(x, context, token_mask=token_mask, context_mask=key_mask)
    got = ksvd_loss(layer)
    _, sequences = dense_run(layer, x, token_mask, context, key_mask)
    want = torch.stack([released_j(layer, s) for s in sequences]).square().mean()
    assert_same_with_gradients(layer, got, want, [x, context])
    run = layer.passes.runs[-1]
    assert run.num_queries.tolist() == (
        [N] * B if token_mask is None else token_mask.sum(1).tolist()
    )
    assert run.num_keys.tolist() == ([K] * B if key_mask is None else key_mask.sum(1).tolist())


def test_a_gram_matrix_of_the_keys_is_that_of_the_context(layer):
    x, context = inputs()
    layer(x, context)
    first = layer.passes.runs[-1]
    layer(randn(B, N, D, seed=2), context)
    second = layer.passes.runs[-1]
    assert torch.equal(first.sums.grams.k, second.sums.grams.k)
    assert not torch.equal(first.sums.grams.q, second.sums.grams.q)


@pytest.mark.parametrize("feature_map", ["cosine", "exponential"])
@pytest.mark.parametrize("weights", ["sampled", "dual"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_masked_context_changes_nothing(weights, feature_map, bad):
    layer = build(weights=weights, feature_map=feature_map)
    x, context = inputs()
    mask, key_mask = MASKS["empty"], CONTEXT_MASKS["empty"]
    results = []
    for filling in (0.0, bad):
        poisoned = torch.where(key_mask[..., None], context, filling)
        y = layer(x, poisoned, token_mask=mask, context_mask=key_mask)
        total = y.sum() + ksvd_loss(layer, objective="explained_energy")
        results.append([y, *torch.autograd.grad(total, [x, context, layer.k_proj.weight])])
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)


@pytest.mark.parametrize("weights", ["sampled", "dual"])
def test_a_sequence_without_context_still_has_an_output(weights):
    """Its W_e is 0: what is left of a sampled layer is the bias, of a dual one the r-score too."""
    layer = build(weights=weights, scores="e")
    x, context = inputs()
    y = layer(x, context, context_mask=torch.zeros(B, K, dtype=torch.bool))
    bias = layer.out_proj(layer.score_proj.bias.repeat(H))
    assert_close(y, bias.expand_as(y))


@pytest.mark.parametrize("weights", ["sampled", "dual"])
def test_lengths_need_not_agree(weights):
    layer = build(weights=weights)
    for n, k in ((1, 1), (1, 97), (97, 1)):
        x, context = randn(B, n, D), randn(B, k, D, seed=1)
        assert_close(layer(x, context), dense(layer, x, None, context))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "static"}, r"context .*weights='static'"),
        ({"weights": "static", "causal": True}, r"context .*causal=True"),
        ({"weights": "dual", "causal": True}, r"context .*causal=True"),
    ],
    ids=str,
)
def test_layers_that_cannot_have_a_context(options, message):
    x, context = inputs()
    with pytest.raises(ValueError, match=message):
        build(**options)(x, context)
