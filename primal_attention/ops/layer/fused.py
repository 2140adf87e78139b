"""All of a Primal layer as one fused op, whose backward pass is one too.

The projections lie side by side, and so do the gradients of what was projected: each of x, W and
its bias gets its own at once; what the landmarks add to that of x is added at their rows alone. The
products with the matrices of the projections are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from primal_attention.ops.layer.eager import (
    LayerInputs,
    layer,
    parameter_trace,
    softplus_lambda,
)
from primal_attention.ops.layer.fused_dual import (
    Kept,
    LayerGradients,
    attended,
    forward_dual,
    heads_of,
    takes_two_passes,
    write_dual_gradients,
)
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal.eager import Attended
from primal_attention.ops.primal.fused import (
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
from primal_attention.ops.triton.sums import column_sum
from primal_attention.precision import operand_dtype


class LayerOp(FusedOp):
    """From the tokens to the outputs."""

    name = "layer"
    inputs = LayerInputs
    differentiable = (
        "x",
        *("q_weight", "k_weight", "h_weight", "q_bias", "k_bias", "h_bias", "w_e", "w_r"),
        *("score_weight", "score_bias", "out_weight", "out_bias", "raw_lambda"),
    )
    outputs = ("out", "gram_q", "gram_k", *Kept._fields)
    num_outputs, first_kept = 7, 3

    def supports(self, given: LayerInputs) -> bool:
        """Whether the passes are made for these dtypes, sizes and maps."""
        if given.x.dtype not in DOTS:
            return False
        maps = has_fused_form(given.map_q) and has_fused_form(given.map_k)
        return maps and _supports_sizes(given)

    def empty(self, given: LayerInputs) -> Sequence[Tensor]:
        """All outputs, unwritten."""
        x, (B, N, _), H = given.x, given.x.shape, given.num_heads
        P, S, C = _sizes(given)
        of_sums, dual_causal = partial(x.new_empty, dtype=torch.float32), _is_dual_causal(given)
        static = not given.is_dual and given.positions is None
        lead = (H,) if static else (B, H)
        of_a = torch.float32 if static else operand_dtype(x.dtype, torch.float32)
        states: tuple[int, ...] = (0,)
        of_states = torch.float32
        if dual_causal:
            block, of_states = fused_dual.kept_states(x.dtype, P, S, C)
            states = B, -(-N // block), H, 2, P, S
        rows, out = 2 * H * (P + S if given.is_dual else P), given.out_weight
        return (
            x.new_empty((B, N, H, C) if out is None else (B, N, len(out))),
            *(of_sums((B, H, P, P) if given.grams else (0,)) for _ in range(2)),
            *(of_sums((*lead, P, S)) for _ in range(2)),
            of_sums(0 if given.positions is None else H),
            of_sums(0 if given.raw_lambda is None else given.raw_lambda.shape),
            x.new_empty((B, N, rows)),
            *(
                of_sums(0)
                if dual_causal
                else x.new_empty(0 if c is None else (*lead, P, C), dtype=of_a)
                for c in given.score_maps
            ),
            x.new_empty(states, dtype=of_states),
            of_sums(B if given.is_dual else 0),
            x.new_empty(rows, x.shape[2]),
            x.new_empty(0 if out is None else (B, N, H * C)),
        )

    def forward(self, given: LayerInputs, *, keep: bool) -> Sequence[Tensor]:
        """The outputs of the layer, and what the backward pass needs of their making."""
        x, (weight, bias) = given.x, given.projection
        rows, nothing = F.linear(x, weight, bias), float32(x, 0)
        inverse_n = states = nothing
        if not given.is_dual:
            heads, gram_q, gram_k, e, r, rows, a_e, a_r = _forward_given(given, rows)
        else:
            inverse_n = inverse_counts(x, given.token_mask)
            if given.causal:
                heads, r, e, gram_q, gram_k, states = fused_dual.walk_forward(
                    _dual_of(given, rows), grams=given.grams, keep=keep, inverse_n=inverse_n
                )
                a_e = a_r = nothing
            else:
                heads, gram_q, gram_k, e, r, a_e, a_r = forward_dual(given, rows, inverse_n)
        out, flat = heads, nothing
        if given.out_weight is not None:
            flat = heads.flatten(2)
            out = F.linear(flat, *_output_projection(given))
        statistics = parameter_trace(given), softplus_lambda(given)
        kept = Kept(e, r, *statistics, rows, a_e, a_r, states, inverse_n, weight, flat)
        return out, gram_q, gram_k, *kept

    def backward(self, given: LayerInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tensors; those of the rows are written over these where they can be."""
        kept, d = Kept(*call.kept), LayerGradients(*call.grads)
        found: dict[str, Tensor] = {}
        if d.out is not None and given.out_weight is not None:
            weight, _ = _output_projection(given)
            names = {"weight": "out_weight", "bias": "out_bias"}
            wanted = {"x"} | {short for short, name in names.items() if name in call.wanted}
            of_out = affine_gradients(kept.heads, weight, d.out, frozenset(wanted))
            found |= {names[short]: of_out[short] for short in wanted - {"x"}}
            d = d._replace(out=torch.unflatten(of_out["x"], -1, (given.num_heads, -1)))
        if not given.is_dual:
            found |= _backward_given(given, kept, d, call)
        elif given.causal:
            found |= _backward_dual_causal(given, kept, d, call)
        else:
            over = call.spent and takes_two_passes(given)
            d_rows = kept.rows if over else torch.empty_like(kept.rows)
            d_bias = _empty_bias(given)
            maps = write_dual_gradients(given, kept, d, heads_of(given, d_rows), d_bias)
            found |= _with_projection(given, kept, d_rows, maps, d_bias, call)
        found |= _statistic_gradients(given, d, found)
        return {name: _as_given(given, name, found) for name in call.wanted}

    def eager(self, given: LayerInputs) -> Sequence[Tensor]:
        """The outputs of the layer, in plain PyTorch."""
        return layer(given)


def _as_given(given: LayerInputs, name: str, found: dict[str, Tensor]) -> Tensor:
    """The gradient of an input in its dtype; zero where it has no part in what has gradients."""
    tensor: Tensor = getattr(given, name)
    return found[name].to(tensor.dtype) if name in found else torch.zeros_like(tensor)


def _output_projection(given: LayerInputs) -> tuple[Tensor, Tensor | None]:
    """Its weight and bias in the dtype of x."""
    assert given.out_weight is not None
    bias = None if given.out_bias is None else given.out_bias.to(given.x.dtype)
    return given.out_weight.to(given.x.dtype), bias


def _statistic_gradients(
    given: LayerInputs, d: LayerGradients, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients by the trace of the parameters, added to what was found, and by Lambda."""
    more: dict[str, Tensor] = {}
    if d.trace is not None:
        for name, other in (("w_e", given.w_r), ("w_r", given.w_e)):
            assert other is not None
            by_trace = d.trace[:, None, None] * other
            more[name] = found[name] + by_trace if name in found else by_trace
    if d.lambda_diag is not None and given.raw_lambda is not None:
        more["raw_lambda"] = torch.ops.aten.softplus_backward(
            d.lambda_diag, given.raw_lambda.float(), 1, 20
        )
    return more


def _empty_bias(given: LayerInputs) -> Tensor | None:
    return None if given.score_bias is None else torch.empty_like(given.score_bias)


def _sizes(given: LayerInputs) -> tuple[int, int, int]:
    """P, S and C."""
    return given.feature_dim, given.num_directions, len(given.score_weight)


def _supports_sizes(given: LayerInputs) -> bool:
    (P, S, C), dtype = _sizes(given), given.x.dtype
    if _is_dual_causal(given):
        return fused_dual.takes_sizes(dtype, P, S, C, *given.maps)
    if padded(max(P, C)) > 256:
        return False
    if given.landmarks is not None:
        return supports_sampled(_sampled(given))
    maps = supports_maps(S, given.w_e, given.w_r, *given.score_maps)
    return maps and (not given.causal or padded(P) in fused_mean.CONFIGS)


def _is_dual_causal(given: LayerInputs) -> bool:
    return given.is_dual and given.causal


def inverse_counts(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """1 / n for the n real tokens of each sequence, [B], and 1 where there are none."""
    if token_mask is None:
        return x.new_full(x.shape[:1], 1 / max(x.shape[1], 1), dtype=torch.float32)
    counts = token_mask.sum(1, dtype=torch.float32)
    return counts.clamp_(min=1).reciprocal_()


def _attended(given: LayerInputs, rows: Tensor, a_e: Tensor, a_r: Tensor) -> Attended:
    """Queries and keys, the only rows there are, and A_e, A_r."""
    q, k = torch.unflatten(rows, -1, (2, given.num_heads, -1)).unbind(2)
    return attended(given, q, k, a_e, a_r)


def _forward_given(given: LayerInputs, rows: Tensor) -> tuple[Tensor, ...]:
    """Weights of parameters: outputs, Gram matrices, W_e, W_r, rows, A_e and A_r."""
    if given.causal:
        z = torch.unflatten(rows, -1, (2 * given.num_heads, -1))  # heads of one tensor
        counts = fused_mean.counts_if_masked(z, given.token_mask)
        means, _ = fused_mean.means(z, None, counts, given.token_mask)
        rows = means.flatten(2)
    if given.positions is None:
        weights = _given_weights(given)
        e, r = (w.new_empty(w.shape, dtype=torch.float32) for w in weights[:2])
        a_e, a_r = collapse(weights, PRODUCTS[rows.dtype], torch.float32, (e, r))
    else:
        of_a = operand_dtype(rows.dtype, torch.float32)
        e, r, a_e, a_r = sample(_sampled(given), of_a)
    rows_of = _attended(given, rows, a_e, a_r)
    out, gram_q, gram_k = attend(rows_of, gram_q=given.grams, gram_k=given.grams)
    return out, gram_q, gram_k, e, r, rows, a_e, a_r


def _given_weights(given: LayerInputs) -> Weights:
    assert given.w_e is not None
    assert given.w_r is not None
    return Weights(given.w_e, given.w_r, *given.score_maps)


def _backward_given(
    given: LayerInputs, kept: Kept, d: LayerGradients, call: Backward
) -> dict[str, Tensor]:
    """Gradients with weights of parameters."""
    rows_of = _attended(given, kept.rows, kept.a_e, kept.a_r)
    over = call.spent and takes_one_pass(rows_of)
    d_rows = kept.rows if over else torch.empty_like(kept.rows)
    d_qk = torch.unflatten(d_rows, -1, (2, given.num_heads, -1))
    sides = rows_of.a_e, rows_of.a_r
    da_e, da_r = (a if over or a is None else torch.empty_like(a) for a in sides)
    d_bias = _empty_bias(given)
    dq, dk = d_qk.unbind(2)
    into = InputGradients(dq, dk, da_e, da_r, d_bias)
    d_shift = None
    if given.causal:
        d_rows, d_shift = _mean_gradients(rows_of, d, into, d_qk.flatten(2, 3))
    else:
        write_gradients(rows_of, d.outputs, into)
    used = (None, None) if d.out is None else (da_e, da_r)
    grads = WeightGradients(d.e, d.r, *used)
    if given.positions is None:
        found = collapse_gradients(_given_weights(given), grads, PRODUCTS[d_rows.dtype])
        return _with_projection(given, kept, d_rows, found, d_bias, call, d_shift)
    found = _with_projection(given, kept, d_rows, {}, d_bias, call, d_shift)
    dx = found.get("x")
    d_tokens = None if dx is None else torch.unflatten(dx, -1, (given.num_heads, -1))
    return found | _with_map(sampled_gradients(_sampled(given), kept.e, kept.r, grads, d_tokens))


def _sampled(given: LayerInputs) -> Sampled:
    assert given.positions is not None
    return Sampled(given.x, given.positions, *_given_weights(given), given.scale)


def _mean_gradients(
    rows_of: Attended, d: LayerGradients, into: InputGradients, d_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys before the means, side by side, and their column sum.

    The pass that writes the gradients of the means divides them by the number of tokens, where it
    can: rounded once, as they would be anyway, they go into the sums as they are. The range of
    float16 is too short for that. It adds up its shares of them too, which are then the segments of
    the walk that follows.
    """
    q, mask = rows_of.q, rows_of.token_mask
    counts = fused_mean.counts_if_masked(q, mask)
    divided = q.dtype != torch.float16 and takes_one_pass(rows_of)
    known = _segments_to_sum(rows_of, d_z) if divided else None
    by_counts = ByCounts(counts) if divided else None
    sums = None if known is None else known[1]
    write_gradients(rows_of, d.outputs, into, by_counts=by_counts, sums=sums)
    dz, total = fused_mean.mean_gradients_with_sum(d_z, counts, mask, divided=divided, known=known)
    return dz.flatten(2), total.flatten()


def _segments_to_sum(rows_of: Attended, d_z: Tensor) -> fused_mean.Known | None:
    """The shares of the pass that writes gradients d_z, and room for their sums."""
    shares = gradient_shares(rows_of)
    if shares.splits == 1 or fused_mean.is_one_segment(d_z):
        return None
    B, _, *head = d_z.shape
    return Segments(shares.tokens, shares.splits), float32(d_z, B, shares.splits, *head)


def _dual_of(given: LayerInputs, rows: Tensor) -> Dual:
    counts = fused_mean.counts_if_masked(given.x, given.token_mask)
    tokens = _dual_tokens(given, rows)
    maps = *given.score_maps, given.score_bias
    return Dual(*tokens, *maps, counts, given.token_mask, *given.maps)


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
    d_shift = None if given.q_bias is None else kept.rows.new_empty(kept.rows.shape[-1])
    dc_e, dc_r, d_bias = fused_dual.walk_backward(
        dual,
        kept.states,
        DualGradients(d_out, d.r, d.e, d.gram_q, d.gram_k),
        _dual_tokens(given, d_rows),
        d_shift,
        kept.inverse_n,
    )
    found = {name: each for name, each in (("c_e", dc_e), ("c_r", dc_r)) if each is not None}
    return _with_projection(given, kept, d_rows, found, d_bias, call, d_shift)


def _with_map(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was found, with the gradient of the score projection in place of its parts."""
    parts = [found.pop(name).mT for name in ("c_e", "c_r") if name in found]
    return found | {"score_weight": parts[0] if len(parts) == 1 else torch.cat(parts, 1)}


def _with_projection(
    given: LayerInputs,
    kept: Kept,
    d_rows: Tensor,
    found: dict[str, Tensor],  # has c_e and c_r
    d_bias: Tensor | None,
    call: Backward,
    d_shift: Tensor | None = None,  # where it is known
) -> dict[str, Tensor]:
    """What was found, and the gradients of the bias, of x and of all projections."""
    found = _with_map(found) if found else found
    if d_bias is not None:
        found["score_bias"] = d_bias
    wanted = set()
    for kind, names in _PROJECTIONS.items():
        if call.wanted & set(names):
            wanted.add(kind)
    known = {} if d_shift is None else {"bias": d_shift}
    of_rows = affine_gradients(given.x, kept.weight, d_rows, frozenset(wanted), **known)
    heights = [len(w) for w in (given.q_weight, given.k_weight, given.h_weight) if w is not None]
    for kind in wanted - {"x"}:
        parts = of_rows[kind].to(given.q_weight.dtype).split_with_sizes(heights)
        found |= dict(zip(_PROJECTIONS[kind], parts, strict=False))
    return found | ({"x": of_rows["x"]} if "x" in wanted else {})


def affine_gradients(
    x: Tensor, weight: Tensor, d_y: Tensor, wanted: frozenset[str], **known: Any
) -> dict[str, Tensor]:
    """The wanted gradients of x, weight and bias; those that are known are not computed."""
    rows, found = d_y.reshape(-1, d_y.shape[-1]), dict(known)
    if "x" in wanted:
        found["x"] = F.linear(rows, weight.mT).view(x.shape)
    if "weight" in wanted:
        found["weight"] = rows.mT @ x.reshape(-1, x.shape[-1])
    if "bias" in wanted and "bias" not in found:
        found["bias"] = column_sum(rows)
    return found


_PROJECTIONS = {
    "x": ("x",),
    "weight": ("q_weight", "k_weight", "h_weight"),
    "bias": ("q_bias", "k_bias", "h_bias"),
}
