"""What a training pass keeps for the backward pass: neither scores nor features.

Sizes are such that the number of elements tells what a tensor can be: tokens have B N D elements,
scores of one side B N H S, those of both sides twice as many.
"""

import pytest
import torch

from primal_attention import ksvd_loss
from primal_attention.ops.primal import reference

from .dense import MASKS, B, C, D, H, N, S, build, randn

TOKENS, SCORES = B * N * D, B * N * H * S
FORMS = {
    "sampled": {"weights": "sampled"},
    "static causal": {"weights": "static", "causal": True},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
}


def saved_by(function):
    """Every tensor that the graph keeps, and the graph's output."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return kept, output


def training_pass(options, mask=None):
    layer = build(**options).train()
    x = randn(B, N, D).requires_grad_()
    outputs = {}
    for name in ("q_proj", "k_proj", "h_proj", "out_proj"):  # a hooked score_proj needs the scores
        if hasattr(layer, name):
            getattr(layer, name).register_forward_hook(
                lambda module, args, output, name=name: outputs.update({name: output})
            )

    def run():
        y = layer(x, token_mask=mask)
        return y, ksvd_loss(layer)

    kept, (y, loss) = saved_by(run)
    (y.sum() + loss).backward()
    assert all(p.grad is not None for p in layer.parameters() if p is not layer.raw_lambda)
    return kept, outputs, x, layer


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def is_of_scores(tensor):
    """As many elements as the scores of one side or of both, for all tokens or all but a few."""
    return tensor.numel() in (SCORES, 2 * SCORES) or (S in tensor.shape and N in tensor.shape)


def test_the_sizes_cannot_be_confused():
    sizes = [TOKENS, SCORES, 2 * SCORES, B * H * C * S, B * H * C * C, 3 * S * D * B, H * 3 * S * S]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("form", ["sampled", "static causal"])
def test_no_score_is_kept(form, mask):
    kept, *_ = training_pass(FORMS[form], MASKS[mask])
    assert kept
    assert [tuple(tensor.shape) for tensor in kept if is_of_scores(tensor)] == []


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("form", ["dual", "dual causal"])
def test_dual_layers_keep_dual_variables_and_no_score(form, mask):
    """H_e and H_r are outputs of a projection and have the size of scores; nothing else has."""
    kept, outputs, *_ = training_pass(FORMS[form], MASKS[mask])
    of_scores = [tensor for tensor in kept if is_of_scores(tensor)]
    assert {storage(tensor) for tensor in of_scores} == {storage(outputs["h_proj"])}


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_a_sampled_layer_keeps_x_q_k_and_the_head_outputs(mask):
    kept, outputs, x, _ = training_pass(FORMS["sampled"], MASKS[mask])
    of_tokens = {storage(tensor): tensor for tensor in kept if tensor.numel() == TOKENS}
    known = {storage(outputs[name]) for name in ("q_proj", "k_proj")}
    assert known <= of_tokens.keys()
    others = [tensor for address, tensor in of_tokens.items() if address not in known]
    assert len(others) == 2, "the tokens (zeroed at padding) and what out_proj reads"
    if mask == "none":
        assert storage(x) in of_tokens


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("form", FORMS)
def test_no_features_are_kept(form, mask):
    """Cosine features are the only tensors of token size whose heads have unit length."""
    kept, *_ = training_pass(FORMS[form], MASKS[mask])
    real = torch.ones(B, N, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask]
    for tensor in kept:
        if tensor.numel() == TOKENS and tensor.is_floating_point():
            for heads in possible_heads(tensor):
                lengths = heads.norm(dim=-1)[real]
                assert (lengths - 1).abs().max() > 1e-6, "phi was kept"


def possible_heads(tensor):
    """The tensor as [B, N, H, C], from token-first and from head-first layouts."""
    if tensor.shape == (B, H, N, C):
        return [tensor.transpose(1, 2)]
    return [tensor.reshape(B, N, H, C)]


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_keeps_no_float32_copy_of_the_tokens(form):
    layer = build(**FORMS[form], dtype=torch.bfloat16).train()
    x = randn(B, N, D, dtype=torch.bfloat16).requires_grad_()
    kept, _ = saved_by(lambda: (layer(x), ksvd_loss(layer)))
    wide = [tuple(t.shape) for t in kept if t.dtype == torch.float32 and t.numel() >= TOKENS]
    assert wide == []


def test_the_measurement_sees_what_the_reference_keeps():
    """The form with explicit scores keeps both, or the tests above would show nothing."""
    q, k = (randn(B, N, H, C, seed=seed).requires_grad_() for seed in (0, 1))
    w = randn(B, H, C, S, seed=2).requires_grad_()
    c = randn(S, C, seed=3).requires_grad_()
    kept, _ = saved_by(lambda: reference.primal_attention(q, k, w, w, c, c))
    assert any(is_of_scores(tensor) for tensor in kept)
    of_tokens = [tensor for tensor in kept if tensor.numel() == TOKENS]
    lengths = [heads.norm(dim=-1) for tensor in of_tokens for heads in possible_heads(tensor)]
    assert any((length - 1).abs().max() < 1e-6 for length in lengths)


def test_evaluation_without_gradients_keeps_nothing():
    layer = build().eval()
    with torch.no_grad():
        kept, _ = saved_by(lambda: layer(randn(B, N, D)))
    assert kept == []
    assert layer.ksvd_runs == []
