"""All of a Primal layer as one fused op, whose backward pass is one too.

The projections lie side by side, and so do the gradients of what was projected: each of x, W and
its bias gets its own at once. The products with the projections are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.causal import fused_dual as causal_dual
from primal_attention.ops.causal import fused_mean
from primal_attention.ops.landmarks import fused as landmarks
from primal_attention.ops.layer import fused_dual
from primal_attention.ops.layer.eager import LayerInputs, layer, parameter_trace, softplus_lambda
from primal_attention.ops.layer.fused_dual import Kept, LayerGradients, attended
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal import fused as primal
from primal_attention.ops.primal import fused_collapse as collapse
from primal_attention.ops.primal.eager import Attended
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import DOTS, PRODUCTS, Segments, column_sum, float32, padded
from primal_attention.precision import operand_dtype

_PROJECTIONS = {
    "x": ("x",),
    "weight": ("q_weight", "k_weight", "h_weight"),
    "bias": ("q_bias", "k_bias", "h_bias"),
}


class LayerOp(FusedOp):
    """From the tokens to the outputs."""

    name = "layer"
    inputs = LayerInputs
    differentiable = (
        *("x", *_PROJECTIONS["weight"], *_PROJECTIONS["bias"], "w_e", "w_r"),
        *("score_weight", "score_bias", "out_weight", "out_bias", "raw_lambda"),
    )
    outputs = ("out", "gram_q", "gram_k", *Kept._fields)
    num_outputs, first_kept = 7, 3

    def supports(self, given: LayerInputs) -> bool:
        """Return whether the passes take these dtypes, sizes and maps."""
        (P, S, C), dtype = given.sizes, given.x.dtype
        if dtype not in DOTS or not tt.has_maps(*given.maps):
            return False
        if given.is_dual and given.causal:
            return causal_dual.takes_sizes(dtype, P, S, C, *given.maps)
        if padded(max(P, C)) > 256:
            return False
        if given.positions is not None:
            return landmarks.supports_sampled(_sampled(given))
        maps = collapse.supports_maps(S, given.w_e, given.w_r, *given.score_maps)
        return maps and (not given.causal or padded(P) in fused_mean.CONFIGS)

    def empty(self, given: LayerInputs) -> Sequence[Tensor]:
        """Allocate all outputs."""
        x, (B, N, D), H, (P, S, C) = given.x, given.x.shape, given.num_heads, given.sizes
        of_sums = partial(x.new_empty, dtype=torch.float32)
        dual_causal = given.is_dual and given.causal
        static = not given.is_dual and given.positions is None
        lead = (H,) if static else (B, H)
        of_a = torch.float32 if static or dual_causal else operand_dtype(x.dtype, torch.float32)
        states: tuple[int, ...] = (0,)
        of_states = torch.float32
        if dual_causal:
            block, of_states = causal_dual.kept_states(x.dtype, P, S, C)
            states = B, -(-N // block), H, 2, P, S
        rows, out = 2 * H * (P + S if given.is_dual else P), given.out_weight
        of_maps = [(0,) if c is None or dual_causal else (*lead, P, C) for c in given.score_maps]
        return (
            x.new_empty((B, N, H, C) if out is None else (B, N, len(out))),
            *(of_sums((B, H, P, P) if given.grams else (0,)) for _ in range(2)),
            *(of_sums((*lead, P, S)) for _ in range(2)),
            of_sums(0 if given.positions is None else H),
            of_sums(0 if given.raw_lambda is None else given.raw_lambda.shape),
            x.new_empty((B, N, rows)),
            *(x.new_empty(shape, dtype=of_a) for shape in of_maps),
            x.new_empty(states, dtype=of_states),
            of_sums(B if given.is_dual else 0),
            x.new_empty(rows, D),
            x.new_empty(0 if out is None else (B, N, H * C)),
        )

    def forward(self, given: LayerInputs, *, keep: bool) -> Sequence[Tensor]:
        """Compute the outputs of the layer, and what the backward pass needs of the way."""
        x, (weight, bias) = given.x, given.projection
        rows, nothing = F.linear(x, weight, bias), float32(x, 0)
        inverse_n = states = nothing
        if not given.is_dual:
            heads, gram_q, gram_k, e, r, rows, a_e, a_r = _forward_given(given, rows)
        else:
            inverse_n = _inverse_counts(x, given.token_mask)
            if given.causal:
                heads, r, e, gram_q, gram_k, states = causal_dual.walk_forward(
                    _dual_of(given, rows), grams=given.grams, keep=keep, inverse_n=inverse_n
                )
                a_e = a_r = nothing
            else:
                found = fused_dual.forward_dual(given, rows, inverse_n)
                heads, gram_q, gram_k, e, r, a_e, a_r = found
        out, flat = heads, nothing
        if given.out_weight is not None:
            flat = heads.flatten(2)
            out = F.linear(flat, *given.output_projection)
        statistics = parameter_trace(given), softplus_lambda(given)
        kept = Kept(e, r, *statistics, rows, a_e, a_r, states, inverse_n, weight, flat)
        return out, gram_q, gram_k, *kept

    def backward(self, given: LayerInputs, call: Backward) -> dict[str, Tensor]:
        """Compute gradients; those of the rows are written over these where they can be."""
        kept, d = Kept(*call.kept), LayerGradients(*call.grads)
        found: dict[str, Tensor] = {}
        if d.out is not None and given.out_weight is not None:
            wanted = {"x"} | {kind for kind in ("weight", "bias") if f"out_{kind}" in call.wanted}
            weight, _ = given.output_projection
            of_out = _affine_gradients(kept.heads, weight, d.out, wanted)
            d = d._replace(out=torch.unflatten(of_out.pop("x"), -1, (given.num_heads, -1)))
            found = {f"out_{kind}": each for kind, each in of_out.items()}
        d_bias = None if given.score_bias is None else torch.empty_like(given.score_bias)
        if not given.is_dual:
            rows = _backward_given(given, kept, d, d_bias, call.spent)
        elif given.causal:
            rows = _backward_dual_causal(given, kept, d)
        else:
            over = call.spent and fused_dual.takes_two_passes(given)
            d_rows = kept.rows if over else torch.empty_like(kept.rows)
            d_heads = fused_dual.heads_of(given, d_rows)
            maps = fused_dual.write_dual_gradients(given, kept, d, d_heads, d_bias)
            rows = _Rows(d_rows, maps, d_bias)
        found |= _projection_gradients(given, kept, rows, call)
        if rows.weights is not None:
            dx, weights = found.get("x"), (kept.e, kept.r)
            d_tokens = None if dx is None else torch.unflatten(dx, -1, (given.num_heads, -1))
            sampled = _sampled(given)
            found |= landmarks.sampled_gradients(sampled, weights, rows.weights, d_tokens)
        parts = [found.pop(name).mT for name in ("c_e", "c_r") if name in found]
        found["score_weight"] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found |= _statistic_gradients(given, d, found)
        tensors = {name: getattr(given, name) for name in call.wanted}
        return {  # zero where an input has no part in what has gradients
            name: found[name].to(tensor.dtype) if name in found else torch.zeros_like(tensor)
            for name, tensor in tensors.items()
        }

    def eager(self, given: LayerInputs) -> Sequence[Tensor]:
        """Compute the outputs of the layer in plain PyTorch."""
        return layer(given)


class _Rows(NamedTuple):
    """Gradients of what was projected, and of what made the outputs of it."""

    rows: Tensor  # [B, N, R]
    found: dict[str, Tensor]
    bias: Tensor | None  # of the scores
    shift: Tensor | None = None  # [R], the sum of the rows, where it is known
    weights: collapse.WeightGradients | None = None  # those of sampled weights, for the landmarks


def _statistic_gradients(
    given: LayerInputs, d: LayerGradients, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Add gradients by the trace of the parameters to those found; compute those by Lambda."""
    more: dict[str, Tensor] = {}
    if d.trace is not None:
        for name, other in (("w_e", given.w_r), ("w_r", given.w_e)):
            assert other is not None
            by_trace = d.trace[:, None, None] * other
            more[name] = found[name] + by_trace if name in found else by_trace
    if d.lambda_diag is not None and given.raw_lambda is not None:
        raw = given.raw_lambda.float()
        more["raw_lambda"] = torch.ops.aten.softplus_backward(d.lambda_diag, raw, 1, 20)
    return more


def _inverse_counts(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Compute 1 / n for the n real tokens of each sequence, [B], and 1 where there are none."""
    if token_mask is None:
        return x.new_full(x.shape[:1], 1 / max(x.shape[1], 1), dtype=torch.float32)
    return token_mask.sum(1, dtype=torch.float32).clamp_(min=1).reciprocal_()


def _attended(given: LayerInputs, rows: Tensor, a_e: Tensor, a_r: Tensor) -> Attended:
    q, k = torch.unflatten(rows, -1, (2, given.num_heads, -1)).unbind(2)
    return attended(given, q, k, a_e, a_r)


def _given_weights(given: LayerInputs) -> collapse.CollapseWeights:
    assert given.w_e is not None
    assert given.w_r is not None
    return collapse.CollapseWeights(given.w_e, given.w_r, *given.score_maps)


def _sampled(given: LayerInputs) -> landmarks.Sampled:
    assert given.positions is not None
    return landmarks.Sampled(given.x, given.positions, _given_weights(given), given.scale)


def _forward_given(given: LayerInputs, rows: Tensor) -> tuple[Tensor, ...]:
    """Compute outputs, Gram matrices, W_e, W_r, rows, A_e and A_r of weights of parameters."""
    if given.causal:
        z = torch.unflatten(rows, -1, (2 * given.num_heads, -1))  # heads of one tensor
        rows = fused_mean.means(z, given.counts, given.token_mask).flatten(2)
    if given.positions is None:
        weights = _given_weights(given)
        e, r = (w.new_empty(w.shape, dtype=torch.float32) for w in weights[:2])
        a_e, a_r = collapse.collapse(weights, PRODUCTS[rows.dtype], torch.float32, (e, r))
    else:
        of_a = operand_dtype(rows.dtype, torch.float32)
        e, r, a_e, a_r = landmarks.sample(_sampled(given), of_a)
    attending = primal.attend(_attended(given, rows, a_e, a_r), grams=given.grams)
    return *attending, e, r, rows, a_e, a_r


def _backward_given(
    given: LayerInputs, kept: Kept, d: LayerGradients, d_bias: Tensor | None, spent: bool
) -> _Rows:
    """Compute gradients with weights of parameters."""
    rows_of = _attended(given, kept.rows, kept.a_e, kept.a_r)
    over = spent and primal.takes_one_pass(rows_of)
    d_rows = kept.rows if over else torch.empty_like(kept.rows)
    d_qk = torch.unflatten(d_rows, -1, (2, given.num_heads, -1))
    sides = rows_of.a_e, rows_of.a_r
    da_e, da_r = (a if over or a is None else torch.empty_like(a) for a in sides)
    dq, dk = d_qk.unbind(2)
    into = primal.InputGradients(dq, dk, da_e, da_r, d_bias)
    d_shift = None
    if given.causal:
        d_rows, d_shift = _mean_gradients(rows_of, given.counts, d, into, d_qk.flatten(2, 3))
    else:
        primal.write_gradients(rows_of, d.outputs, into)
    used = (None, None) if d.out is None else (da_e, da_r)
    grads = collapse.WeightGradients(d.e, d.r, *used)
    if given.positions is not None:
        return _Rows(d_rows, {}, d_bias, d_shift, grads)
    precision = PRODUCTS[d_rows.dtype]
    found = collapse.collapse_gradients(_given_weights(given), grads, precision)
    return _Rows(d_rows, found, d_bias, d_shift)


def _mean_gradients(
    rows_of: Attended,
    counts: Tensor | None,
    d: LayerGradients,
    into: primal.InputGradients,
    d_z: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute gradients of queries and keys before the means, side by side, and their column sum.

    The pass that writes the gradients of the means divides them by the number of tokens, except in
    float16, whose range is short. It adds up its shares too, which the walk then has as segments.
    """
    q, known = rows_of.q, None
    divided = q.dtype != torch.float16 and primal.takes_one_pass(rows_of)
    if divided and not fused_mean.is_one_segment(d_z):
        shares, (B, _, *head) = primal.gradient_shares(rows_of), d_z.shape
        if shares.splits > 1:
            sums = float32(d_z, B, shares.splits, *head)
            known = Segments(shares.tokens, shares.splits), sums
    by_counts = primal.ByCounts(counts) if divided else None
    primal.write_gradients(rows_of, d.outputs, into, by_counts, None if known is None else known[1])
    mask = rows_of.token_mask
    dz, total = fused_mean.mean_gradients(d_z, counts, mask, divided=divided, known=known)
    return dz.flatten(2), total.flatten()


def _dual_of(given: LayerInputs, rows: Tensor) -> causal_dual.Dual:
    tokens, maps = _dual_tokens(given, rows), (*given.score_maps, given.score_bias)
    return causal_dual.Dual(*tokens, *maps, given.counts, given.token_mask, *given.maps)


def _dual_tokens(given: LayerInputs, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View the rows [B, N, 2 H P + 2 H S] as q, k [B, N, H, P] and h [B, N, 2, H, S]."""
    (P, S, _), H = given.sizes, given.num_heads
    qk, h = rows.split_with_sizes((2 * H * P, 2 * H * S), -1)
    q, k = torch.unflatten(qk, -1, (2, H, P)).unbind(2)
    return q, k, torch.unflatten(h, -1, (2, H, S))


def _backward_dual_causal(given: LayerInputs, kept: Kept, d: LayerGradients) -> _Rows:
    """Compute gradients with dual weights of the tokens up to each."""
    d_rows, dual = torch.empty_like(kept.rows), _dual_of(given, kept.rows)
    d_out = d.out
    if d_out is None:
        d_out = dual.q.new_zeros((*dual.q.shape[:3], dual.sizes[-1]))
    d_shift = None if given.q_bias is None else kept.rows.new_empty(kept.rows.shape[-1])
    grads = causal_dual.DualGradients(d_out, d.r, d.e, d.gram_q, d.gram_k)
    dc_e, dc_r, d_bias = causal_dual.walk_backward(
        dual, kept.states, grads, _dual_tokens(given, d_rows), d_shift, kept.inverse_n
    )
    found = {name: each for name, each in (("c_e", dc_e), ("c_r", dc_r)) if each is not None}
    return _Rows(d_rows, found, d_bias, d_shift)


def _projection_gradients(
    given: LayerInputs, kept: Kept, d: _Rows, call: Backward
) -> dict[str, Tensor]:
    """Compute gradients of x and of all projections, beside those that were found."""
    found = d.found if d.bias is None else d.found | {"score_bias": d.bias}
    wanted = {kind for kind, names in _PROJECTIONS.items() if call.wanted & set(names)}
    known = {} if d.shift is None else {"bias": d.shift}
    of_rows = _affine_gradients(given.x, kept.weight, d.rows, wanted, **known)
    heights = [len(w) for w in (given.q_weight, given.k_weight, given.h_weight) if w is not None]
    for kind in wanted - {"x"}:
        parts = of_rows[kind].to(given.q_weight.dtype).split_with_sizes(heights)
        found |= dict(zip(_PROJECTIONS[kind], parts, strict=False))
    return found | ({"x": of_rows["x"]} if "x" in wanted else {})


def _affine_gradients(
    x: Tensor, weight: Tensor, d_y: Tensor, wanted: set[str], **known: Any
) -> dict[str, Tensor]:
    """Compute the wanted gradients of x, weight and bias, but not those that are known."""
    rows, found = d_y.reshape(-1, d_y.shape[-1]), dict(known)
    if "x" in wanted:
        found["x"] = F.linear(rows, weight.mT).view(x.shape)
    if "weight" in wanted:
        found["weight"] = rows.mT @ x.reshape(-1, x.shape[-1])
    if "bias" in wanted and "bias" not in found:
        found["bias"] = column_sum(rows)
    return found
