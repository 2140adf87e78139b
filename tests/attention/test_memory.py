"""Memory of a long training pass: no features and no kernel values are kept for the backward pass.

The walk goes in several chunks. Sizes are such that the number of elements tells what a tensor is.
"""

import pytest
import torch

from primal_attention import ksvd_loss
from primal_attention.ops.op import chunk_elements

from .dense import B, C, D, H, S, build, masks, randn

N = 97
MASKS = masks(B, N)
TOKENS, SCORES = B * N * D, B * N * H * 2 * S
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


@pytest.fixture(autouse=True)
def short_chunks():
    with chunk_elements(1):
        yield


def training_pass(options, mask=None, dtype=torch.float64):
    layer = build(**options, dtype=dtype).train()
    x = randn(B, N, D, dtype=dtype).requires_grad_()

    def run():
        y = layer(x, token_mask=mask)
        return y, ksvd_loss(layer)

    kept, (y, loss) = saved_by(run)
    (y.sum() + loss).backward()
    assert all(p.grad is not None for p in layer.parameters())
    return kept


def sizes_of(kept):
    """The number of elements of each memory that is kept, once."""
    return {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // each.itemsize
        for each in kept
    }.values()


def possible_heads(tensor):
    """The tensor as [B, N, H, C], from each layout that it may have."""
    if tensor.numel() == 2 * TOKENS and tensor.shape[-2:] == (N, C):
        return [side.permute(1, 2, 0, 3) for side in tensor.reshape(-1, H, B, N, C)]
    if tensor.shape == (B, H, N, C):
        return [tensor.transpose(1, 2)]
    return [tensor.reshape(B, N, H, C)] if tensor.numel() == TOKENS else []


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("form", FORMS)
def test_no_features_are_kept(form, mask):
    """Cosine features are the only tensors of token size whose heads have unit length."""
    real = torch.ones(B, N, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask]
    for tensor in training_pass(FORMS[form], MASKS[mask]):
        for heads in possible_heads(tensor) if tensor.is_floating_point() else []:
            lengths = heads.norm(dim=-1)[real]
            assert (lengths - 1).abs().max() > 1e-6, "phi was kept"


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("form", FORMS)
def test_a_long_pass_keeps_tokens_projections_scores_and_heads(form, mask):
    """x, queries and keys (2), dual variables and scores (of one size), and the head outputs."""
    scores = SCORES * (3 if "dual" in form else 2)  # energies square them
    small = B * H * (-(-N // 16) * 2 * C * S + 6 * C * C + 12 * C * S) + 4 * D * D
    assert sum(sizes_of(training_pass(FORMS[form], MASKS[mask]))) <= 6 * TOKENS + scores + small


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_keeps_no_float32_copy_of_queries_and_keys(form):
    kept = training_pass(FORMS[form], dtype=torch.bfloat16)
    wide = [each for each in kept if each.dtype == torch.float32 and possible_heads(each)]
    assert wide == []


def test_the_measurement_sees_what_one_chunk_keeps():
    """Short work keeps its features, or the tests above would show nothing."""
    with chunk_elements(1 << 30):
        kept = training_pass(FORMS["sampled"])
    lengths = [heads.norm(dim=-1) for each in kept for heads in possible_heads(each)]
    assert any((length - 1).abs().max() < 1e-6 for length in lengths)


def test_evaluation_without_gradients_keeps_nothing():
    layer = build().eval()
    with torch.no_grad():
        kept, _ = saved_by(lambda: layer(randn(B, N, D)))
    assert kept == []
    assert layer.passes.runs == []
