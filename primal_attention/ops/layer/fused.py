"""All of a Primal layer as one fused op, whose backward pass is one too.

The gradients of what was projected lie side by side, so that each of x, W and its bias gets its own
at once; what the landmarks add to that of x is added at their rows alone. The products with the
projection's matrix are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.feature_maps import has_fused_form
from primal_attention.ops.causal import fused_dual, fused_mean
from primal_attention.ops.causal.fused_dual import Dual, DualGradients
from primal_attention.ops.landmarks.fused import (
    Sampled,
    sample,
    sampled_gradients,
    supports_sampled,
)
from primal_attention.ops.layer.eager import FlatInputs, LayerInputs, layer
from primal_attention.ops.layer.fused_dual import (
    Kept,
    LayerGradients,
    forward_dual,
    heads_of,
    sides_of,
    takes_two_passes,
    write_dual_gradients,
)
from primal_attention.ops.linear.fused import affine_gradients
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal.fused_attend import (
    Attended,
    ByCounts,
    InputGradients,
    attend,
    gradient_shares,
    takes_one_pass,
    write_gradients,
)
from primal_attention.ops.primal.fused_collapse import (
    WeightGradients,
    Weights,
    collapse,
    collapse_gradients,
    supports_maps,
)
from primal_attention.ops.triton.launch import DOTS, PRODUCTS, Segments, float32, padded
from primal_attention.precision import operand_dtype


class LayerOp(FusedOp):
    """From the tokens to the outputs of the heads."""

    name = "layer"
    inputs = FlatInputs
    differentiable = ("x", "weight", "shift", "w_e", "w_r", "c_e", "c_r", "bias")
    outputs = ("out", "gram_q", "gram_k", *Kept._fields)
    num_outputs, first_kept = 5, 3

    def supports(self, given: FlatInputs) -> bool:
        """Whether the passes are made for these dtypes, sizes and maps."""
        x, weight, shift, *_ = given
        if given.c_e is None and given.c_r is None:
            return False
        same = x.dtype == weight.dtype and (shift is None or shift.dtype == x.dtype)
        if not same or x.dtype not in DOTS:
            return False
        maps = has_fused_form(given.map_q) and has_fused_form(given.map_k)
        return maps and _supports_sizes(given.nested())

    def empty(self, given: FlatInputs) -> Sequence[Tensor]:
        """All outputs, unwritten."""
        layer = given.nested()
        x, (B, N, _), H = given.x, given.x.shape, given.num_heads
        P, S, C = _sizes(layer)
        of_sums, dual_causal = partial(x.new_empty, dtype=torch.float32), _is_dual_causal(layer)
        static = not layer.is_dual and layer.landmarks is None
        lead = (H,) if static else (B, H)
        of_a = torch.float32 if static else operand_dtype(x.dtype, torch.float32)
        states: tuple[int, ...] = (0,)
        of_states = torch.float32
        if dual_causal:
            block, of_states = fused_dual.kept_states(x.dtype, P, S, C)
            states = B, -(-N // block), H, 2, P, S
        return (
            x.new_empty((B, N, H, C)),
            *(of_sums((B, H, P, P) if given.grams else (0,)) for _ in range(2)),
            *(of_sums((*lead, P, S)) for _ in range(2)),
            x.new_empty((B, N, given.weight.shape[0])),
            *(
                of_sums(0)
                if dual_causal
                else x.new_empty(0 if c is None else (*lead, P, C), dtype=of_a)
                for c in (given.c_e, given.c_r)
            ),
            x.new_empty(states, dtype=of_states),
            of_sums(B if layer.is_dual else 0),
        )

    def forward(self, given: FlatInputs, *, keep: bool) -> Sequence[Tensor]:
        """The outputs of the layer, and what the backward pass needs of their making."""
        layer = given.nested()
        rows = F.linear(given.x, given.weight, given.shift)
        nothing = float32(given.x, 0)
        if not layer.is_dual:
            out, gram_q, gram_k, e, r, rows, a_e, a_r = _forward_given(layer, rows)
            return out, gram_q, gram_k, *Kept(e, r, rows, a_e, a_r, nothing, nothing)
        inverse_n = inverse_counts(given.x, given.token_mask)
        if not layer.causal:
            out, gram_q, gram_k, e, r, a_e, a_r = forward_dual(layer, rows, inverse_n)
            return out, gram_q, gram_k, *Kept(e, r, rows, a_e, a_r, nothing, inverse_n)
        out, r, e, gram_q, gram_k, states = fused_dual.walk_forward(
            _dual_of(layer, rows), grams=layer.grams, keep=keep, inverse_n=inverse_n
        )
        kept = Kept(e, r, rows, nothing, nothing, states, inverse_n)
        return out, gram_q, gram_k, *kept

    def backward(self, given: FlatInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tensors; those of the rows are written over these where they can be."""
        layer, kept, d = given.nested(), Kept(*call.kept), LayerGradients(*call.grads)
        if not layer.is_dual:
            return _backward_given(layer, kept, d, call)
        if layer.causal:
            return _backward_dual_causal(layer, kept, d, call)
        over = call.spent and takes_two_passes(layer)
        d_rows = kept.rows if over else torch.empty_like(kept.rows)
        d_bias = None if given.bias is None else torch.empty_like(given.bias)
        found = write_dual_gradients(layer, kept, d, heads_of(layer, d_rows), d_bias)
        return _with_projection(layer, d_rows, found, d_bias, call)

    def eager(self, given: FlatInputs) -> Sequence[Tensor]:
        """The outputs of the layer, in plain PyTorch."""
        return layer(given.nested())


def _sizes(given: LayerInputs) -> tuple[int, int, int]:
    """P, S and C."""
    c = given.c_r if given.c_e is None else given.c_e
    assert c is not None
    return given.feature_dim, c.shape[0], c.shape[1]


def _supports_sizes(given: LayerInputs) -> bool:
    (P, S, C), dtype = _sizes(given), given.x.dtype
    if _is_dual_causal(given):
        return fused_dual.takes_sizes(dtype, P, S, C, *given.maps)
    if padded(max(P, C)) > 256:
        return False
    if given.landmarks is not None:
        return supports_sampled(_sampled(given))
    maps = supports_maps(S, given.w_e, given.w_r, given.c_e, given.c_r)
    return maps and (not given.causal or padded(P) in fused_mean.CONFIGS)


def _is_dual_causal(given: LayerInputs) -> bool:
    return given.is_dual and given.causal


def inverse_counts(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """1 / n for the n real tokens of each sequence, [B], and 1 where there are none."""
    if token_mask is None:
        return x.new_full(x.shape[:1], 1 / max(x.shape[1], 1), dtype=torch.float32)
    counts = token_mask.sum(1, dtype=torch.float32)
    return counts.clamp_(min=1).reciprocal_()


def _attended(given: LayerInputs, kept: Kept) -> Attended:
    """Queries and keys, the only rows there are, and A_e, A_r."""
    q, k = torch.unflatten(kept.rows, -1, (2, given.num_heads, -1)).unbind(2)
    return Attended(q, k, *sides_of(given, kept), given.bias, given.token_mask, *given.maps)


def _forward_given(given: LayerInputs, rows: Tensor) -> tuple[Tensor, ...]:
    """Weights of parameters: outputs, Gram matrices, W_e, W_r, rows, A_e and A_r."""
    if given.causal:
        z = torch.unflatten(rows, -1, (2 * given.num_heads, -1))  # heads of one tensor
        counts = fused_mean.counts_if_masked(z, given.token_mask)
        means, _ = fused_mean.means(z, None, counts, given.token_mask)
        rows = means.flatten(2)
    assert given.w_e is not None
    assert given.w_r is not None
    if given.landmarks is None:
        e, r = (w.new_empty(w.shape, dtype=torch.float32) for w in (given.w_e, given.w_r))
        weights = Weights(given.w_e, given.w_r, given.c_e, given.c_r)
        a_e, a_r = collapse(weights, PRODUCTS[rows.dtype], torch.float32, (e, r))
    else:
        of_a = operand_dtype(rows.dtype, torch.float32)
        e, r, a_e, a_r = sample(_sampled(given), of_a)
    kept = Kept(e, r, rows, a_e, a_r, rows, rows)
    attended = _attended(given, kept)
    out, gram_q, gram_k = attend(attended, gram_q=given.grams, gram_k=given.grams)
    return out, gram_q, gram_k, e, r, rows, a_e, a_r


def _backward_given(
    given: LayerInputs, kept: Kept, d: LayerGradients, call: Backward
) -> dict[str, Tensor]:
    """Gradients with weights of parameters."""
    attended = _attended(given, kept)
    over = call.spent and takes_one_pass(attended)
    d_rows = kept.rows if over else torch.empty_like(kept.rows)
    d_qk = torch.unflatten(d_rows, -1, (2, given.num_heads, -1))
    sides = attended.a_e, attended.a_r
    da_e, da_r = (a if over or a is None else torch.empty_like(a) for a in sides)
    d_bias = None if given.bias is None else torch.empty_like(given.bias)
    dq, dk = d_qk.unbind(2)
    into = InputGradients(dq, dk, da_e, da_r, d_bias)
    d_shift = None
    if given.causal:
        d_rows, d_shift = _mean_gradients(attended, d, into, d_qk.flatten(2, 3))
    else:
        write_gradients(attended, d.outputs, into)
    found = _with_projection(given, d_rows, {}, d_bias, call, d_shift)
    used = (None, None) if d.out is None else (da_e, da_r)
    grads = WeightGradients(d.e, d.r, *used)
    assert given.w_e is not None
    assert given.w_r is not None
    if given.landmarks is None:
        weights = Weights(given.w_e, given.w_r, given.c_e, given.c_r)
        return found | collapse_gradients(weights, grads, PRODUCTS[d_rows.dtype])
    dx = found.get("x")
    d_tokens = None if dx is None else torch.unflatten(dx, -1, (given.num_heads, -1))
    return found | sampled_gradients(_sampled(given), kept.e, kept.r, grads, d_tokens)


def _sampled(given: LayerInputs) -> Sampled:
    assert given.w_e is not None
    assert given.w_r is not None
    assert given.landmarks is not None
    _, positions, scale = given.landmarks
    return Sampled(given.x, positions, given.w_e, given.w_r, given.c_e, given.c_r, scale)


def _mean_gradients(
    attended: Attended, d: LayerGradients, into: InputGradients, d_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys before the means, side by side, and their column sum.

    The pass that writes the gradients of the means divides them by the number of tokens, where it
    can: rounded once, as they would be anyway, they go into the sums as they are. The range of
    float16 is too short for that. It adds up its shares of them too, which are then the segments of
    the walk that follows.
    """
    q, mask = attended.q, attended.token_mask
    counts = fused_mean.counts_if_masked(q, mask)
    divided = q.dtype != torch.float16 and takes_one_pass(attended)
    known = _segments_to_sum(attended, d_z) if divided else None
    by_counts = ByCounts(counts) if divided else None
    sums = None if known is None else known[1]
    write_gradients(attended, d.outputs, into, by_counts=by_counts, sums=sums)
    dz, total = fused_mean.mean_gradients_with_sum(d_z, counts, mask, divided=divided, known=known)
    return dz.flatten(2), total.flatten()


def _segments_to_sum(attended: Attended, d_z: Tensor) -> fused_mean.Known | None:
    """The shares of the pass that writes gradients d_z, and room for their sums."""
    shares = gradient_shares(attended)
    if shares.splits == 1 or fused_mean.is_one_segment(d_z):
        return None
    B, _, *head = d_z.shape
    return Segments(shares.tokens, shares.splits), float32(d_z, B, shares.splits, *head)


def _dual_of(given: LayerInputs, rows: Tensor) -> Dual:
    counts = fused_mean.counts_if_masked(given.x, given.token_mask)
    tokens = _dual_tokens(given, rows)
    return Dual(*tokens, given.c_e, given.c_r, given.bias, counts, given.token_mask, *given.maps)


def _dual_tokens(given: LayerInputs, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k [B, N, H, P] and h [B, N, 2, H, S] of the rows [B, N, 2 H P + 2 H S]."""
    of_q = given.num_heads * given.feature_dim
    q, k, h = rows.tensor_split((of_q, 2 * of_q), -1)
    q, k = (torch.unflatten(z, -1, (given.num_heads, -1)) for z in (q, k))
    return q, k, torch.unflatten(h, -1, (2, given.num_heads, -1))


def _backward_dual_causal(
    given: LayerInputs, kept: Kept, d: LayerGradients, call: Backward
) -> dict[str, Tensor]:
    """Gradients with dual weights of the tokens up to each."""
    d_rows, dual = torch.empty_like(kept.rows), _dual_of(given, kept.rows)
    d_out = d.out
    if d_out is None:
        d_out = dual.q.new_zeros((*dual.q.shape[:3], dual.sizes[-1]))
    d_shift = torch.empty_like(given.shift) if given.shift is not None else None
    dc_e, dc_r, d_bias = fused_dual.walk_backward(
        dual,
        kept.states,
        DualGradients(d_out, d.r, d.e, d.gram_q, d.gram_k),
        _dual_tokens(given, d_rows),
        d_shift,
        kept.inverse_n,
    )
    found = {name: each for name, each in (("c_e", dc_e), ("c_r", dc_r)) if each is not None}
    return _with_projection(given, d_rows, found, d_bias, call, d_shift)


def _with_projection(
    given: LayerInputs,
    d_rows: Tensor,
    found: dict[str, Tensor],
    d_bias: Tensor | None,
    call: Backward,
    d_shift: Tensor | None = None,  # where it is known
) -> dict[str, Tensor]:
    """What was found, and the gradients of the bias, of x, of the weight and of its bias."""
    wanted = call.wanted & {"x", "weight"}
    if "shift" in call.wanted:
        wanted |= {"bias"}
    known = {} if d_shift is None else {"bias": d_shift}
    of_rows = affine_gradients(given.x, given.weight, d_rows, wanted, **known)
    if "bias" in of_rows:
        of_rows["shift"] = of_rows.pop("bias")
    return found | of_rows | ({} if d_bias is None else {"bias": d_bias})
