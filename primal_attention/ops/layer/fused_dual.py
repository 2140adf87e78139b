"""Dual weights in both directions as fused passes over rows in which q, k, H_e, H_r stand together.

Backward, a first pass sums the gradients of A, from which those of the weights follow; a second
writes the gradients of the rows, by both of their uses at once. Of short sequences one program has
all tokens of a sequence and head, in one pass either way.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, n tokens of a block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.layer.eager import LayerInputs
from primal_attention.ops.primal import fused as primal
from primal_attention.ops.primal import fused_collapse as collapse
from primal_attention.ops.primal import fused_moment
from primal_attention.ops.primal.eager import Attended, MomentInputs
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import DOTS, PRODUCTS, add_up, launched, padded, summed
from primal_attention.precision import operand_dtype

# By the largest padded width. The first pass of the backward pass, and the second, which has no
# sums and thus as many programs as it likes.
SUMS, ROWS = (
    {
        dtype: {at: c._replace(**sizes) for at, c in table.items()}
        for dtype, table in primal.BACKWARD.items()
    }
    for sizes in ({"programs": 264}, {"num_stages": 2, "programs": 1 << 30, "least": 8})
)
# Both in one pass: for sequences so short that their tokens are still in the cache when they are
# read again, and so many, times heads, that four of them come to each multiprocessor. Other dtypes
# would need more registers than there are.
WHOLE = {torch.bfloat16: ROWS[torch.bfloat16]}
SHORT, MANY = 256, 528


class Heads(NamedTuple):
    """Views of one tensor of rows."""

    q: Tensor  # [B, N, H, P]
    k: Tensor
    h_e: Tensor  # [B, N, H, S]
    h_r: Tensor


class Kept(NamedTuple):
    """Tensors that the forward pass keeps for the backward pass; empty where there is none."""

    e: Tensor  # W_{e|X} and W_{r|X}
    r: Tensor
    trace: Tensor
    lambda_diag: Tensor
    rows: Tensor  # [B, N, R]: the projections, or the running means of q and k
    a_e: Tensor
    a_r: Tensor
    states: Tensor
    inverse_n: Tensor  # [B]
    weight: Tensor  # of all projections, in the dtype of x
    heads: Tensor  # [B, N, H C], before the output projection


class LayerGradients(NamedTuple):
    """Gradients of what the layer gives, where there are any."""

    out: Tensor | None
    gram_q: Tensor | None
    gram_k: Tensor | None
    e: Tensor | None
    r: Tensor | None
    trace: Tensor | None
    lambda_diag: Tensor | None

    @property
    def outputs(self) -> primal.OutputGradients:
        """Gradients of the outputs and of the Gram matrices."""
        return primal.OutputGradients(*self[:3])


def heads_of(given: LayerInputs, rows: Tensor) -> Heads:
    """View what stands side by side in the rows [B, N, 2 H P + 2 H S]."""
    (P, S, _), H = given.sizes, given.num_heads
    sides = rows.split((H * P, H * P, H * S, H * S), -1)
    return Heads(*(torch.unflatten(side, -1, (H, -1)) for side in sides))


def attended(given: LayerInputs, q: Tensor, k: Tensor, a_e: Tensor, a_r: Tensor) -> Attended:
    """Gather the inputs of a pass over queries and keys, with A of the sides that are output."""
    e = None if given.scores == "r" else a_e
    r = None if given.scores == "e" else a_r
    return Attended(q, k, e, r, given.score_bias, given.token_mask, *given.maps)


def takes_two_passes(given: LayerInputs) -> bool:
    """Return whether all gradients of a token are written at once, and so may overwrite it."""
    return padded(max(given.sizes)) in SUMS[given.x.dtype]


def _is_short(given: LayerInputs) -> bool:
    """Return whether a program takes a whole sequence and head."""
    (B, N, _), both = given.x.shape, given.scores == "both"
    taken = both and given.x.dtype in WHOLE and takes_two_passes(given)
    return taken and N <= SHORT and B * given.num_heads >= MANY


def forward_dual(given: LayerInputs, rows: Tensor, inverse_n: Tensor) -> tuple[Tensor, ...]:
    """Compute outputs, Gram matrices, W_e and W_r, A_e and A_r; empty where not wanted."""
    heads, (map_q, map_k), mask = heads_of(given, rows), given.maps, given.token_mask
    (B, N, H, P), (_, S, C), q = heads.q.shape, given.sizes, heads.q
    e, r = (q.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    of_a, precision = operand_dtype(q.dtype, torch.float32), PRODUCTS[q.dtype]
    if not _is_short(given):
        of_e = MomentInputs(heads.k, heads.h_r, mask, map_k)
        of_r = MomentInputs(q, heads.h_e, mask, map_q)
        fused_moment.add_moments(of_e, e, inverse_n=inverse_n)
        fused_moment.add_moments(of_r, r, inverse_n=inverse_n)
        a = collapse.collapse(collapse.CollapseWeights(e, r, *given.score_maps), precision, of_a)
        return *primal.attend(attended(given, *heads[:2], *a), grams=given.grams), e, r, *a
    (c_e, c_r), config = given.score_maps, primal.FORWARD[q.dtype][padded(max(given.sizes))]
    out, shape = q.new_empty((B, N, H, C)), (B, H, P, P) if given.grams else (0,)
    grams = [q.new_empty(shape, dtype=torch.float32) for _ in range(2)]
    a_e, a_r = (q.new_empty((B, H, P, C), dtype=of_a) for _ in range(2))
    whole_blocks[(B * H,)](
        *heads, c_e, c_r, *launch.contiguous(given.score_bias), launch.mask_bytes(mask),
        inverse_n, out, *(grams if given.grams else (None, None)), e, r, a_e, a_r,
        *map(launch.strides, (q, heads.h_e, out)), *map(launch.matrix_strides, (c_e, c_r)), N, H,
        P, S, C, *given.maps, DOTS[q.dtype], precision,
        config.block, padded(P), padded(S), padded(max(P, C)), **config.launch,
    )  # fmt: skip
    return out, *grams, e, r, a_e, a_r


def write_dual_gradients(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    d_heads: Heads,  # written
    d_bias: Tensor | None,  # written
) -> dict[str, Tensor]:
    """Write the gradients of the rows and of the bias; compute those of c_e and c_r."""
    heads = heads_of(given, kept.rows)
    if not takes_two_passes(given):
        return _write_apart(given, kept, d, (heads, d_heads), d_bias)
    if d.out is not None and _is_short(given):
        return _write_whole(given, kept, d, (heads, d_heads), d_bias)
    sides = attended(given, *heads[:2], kept.a_e, kept.a_r)[2:4]
    found = _weight_gradients(given, kept, d, *_sum_sides(given, d.out, heads, sides, d_bias))
    d_weights = found.pop("w_e"), found.pop("w_r")
    q, (_, N, H, P), (_, S, C) = heads.q, heads.q.shape, given.sizes
    d_out = None if d.out is None else launch.readable(d.out)
    sides = (None, None) if d_out is None else sides
    config = ROWS[q.dtype][padded(max(given.sizes))]
    shares = launch.shares_of(q, config)
    C = 0 if d_out is None else C
    row_gradient_blocks[(2 * shares.programs,)](
        *heads, d_out, *launch.contiguous(*sides, d.gram_q, d.gram_k), *d_weights,
        launch.mask_bytes(given.token_mask), kept.inverse_n, *d_heads,
        *map(launch.strides, (q, heads.h_e, d_out, d_heads.q, d_heads.h_e)),
        N, H, shares.splits, shares.tokens, P, S, C, *given.maps, DOTS[q.dtype],
        config.block, padded(P), padded(S), padded(max(C, 1)), **config.launch,
    )  # fmt: skip
    return found


def _sum_sides(
    given: LayerInputs,
    d_out: Tensor | None,
    heads: Heads,
    sides: Sequence[Any],  # A_e and A_r
    d_bias: Tensor | None,  # written
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of A_e and A_r, and write that of the bias."""
    if d_out is None:
        if d_bias is not None:
            d_bias.zero_()
        return None, None
    q, d_out, (_, N, H, P) = heads.q, launch.readable(d_out), heads.q.shape
    C, config = d_out.shape[-1], SUMS[q.dtype][padded(max(given.sizes))]
    shares = launch.shares_of(q, config)
    da_e, da_r = (None if a is None else torch.empty_like(a) for a in sides)
    with summed(q, shares, da_e, da_r, d_bias) as sums:
        sum_blocks[(2 * shares.programs,)](
            q, heads.k, d_out, launch.mask_bytes(given.token_mask), *sums, launch.strides(q),
            launch.strides(d_out), N, H, shares.splits, shares.tokens, P, C, *given.maps,
            DOTS[q.dtype], config.block, padded(P), padded(C), config.num_stages, **config.launch,
        )  # fmt: skip
    return da_e, da_r


def _write_whole(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    both: tuple[Heads, Heads],  # and their gradients, written
    d_bias: Tensor | None,  # written
) -> dict[str, Tensor]:
    """Write all gradients of the rows and of the bias in one pass, for short sequences."""
    c_e, c_r = given.score_maps
    assert d.out is not None
    assert c_e is not None
    assert c_r is not None
    (heads, d_heads), d_out, dtype = both, launch.readable(d.out), given.x.dtype
    (B, N, H, P), (_, S, C), width = heads.q.shape, given.sizes, padded(max(given.sizes))
    config, stages = WHOLE[dtype][width], SUMS[dtype][width].num_stages
    parts = [kept.e.new_empty(B * H, C, S) for _ in range(2)]
    bias_parts = None if d_bias is None else kept.e.new_empty(B * H, C)
    whole_gradient_blocks[(B * H,)](
        *heads, d_out, *launch.contiguous(kept.a_e, kept.a_r, d.gram_q, d.gram_k),
        *launch.contiguous(kept.e, kept.r, d.e, d.r), c_e, c_r, launch.mask_bytes(given.token_mask),
        kept.inverse_n, *d_heads, *parts, bias_parts,
        *map(launch.strides, (heads.q, heads.h_e, d_out, d_heads.q, d_heads.h_e)),
        *map(launch.matrix_strides, (c_e, c_r)), N, H, P, S, C, *given.maps, DOTS[dtype],
        PRODUCTS[dtype], config.block, padded(P), padded(S), padded(C), stages, **config.launch,
    )  # fmt: skip
    dc_e, dc_r = torch.empty_like(c_e), torch.empty_like(c_r)
    add_up(*zip((*parts, bias_parts), (dc_e.mT, dc_r.mT, d_bias), strict=True))
    return {"c_e": dc_e, "c_r": dc_r}


def _write_apart(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    both: tuple[Heads, Heads],  # and their gradients, written
    d_bias: Tensor | None,  # written
) -> dict[str, Tensor]:
    """Write the gradients by the attention, then add those by the weights, for wide heads."""
    (heads, d_heads), mask, (map_q, map_k) = both, given.token_mask, given.maps
    rows_of = attended(given, *heads[:2], kept.a_e, kept.a_r)
    da_e, da_r = (None if a is None else torch.empty_like(a) for a in rows_of[2:4])
    into_rows = primal.InputGradients(d_heads.q, d_heads.k, da_e, da_r, d_bias)
    primal.write_gradients(rows_of, d.outputs, into_rows)
    used = (None, None) if d.out is None else (da_e, da_r)
    found = _weight_gradients(given, kept, d, *used)
    for name, rows, dz, dh in (
        ("w_e", MomentInputs(heads.k, heads.h_r, mask, map_k), d_heads.k, d_heads.h_r),
        ("w_r", MomentInputs(heads.q, heads.h_e, mask, map_q), d_heads.q, d_heads.h_e),
    ):
        into, by_n = fused_moment.MomentGradients(dz, dh, add=True), kept.inverse_n
        fused_moment.pull_back_moment(rows, found.pop(name), None, into, inverse_n=by_n)
    return found


def _weight_gradients(
    given: LayerInputs, kept: Kept, d: LayerGradients, da_e: Tensor | None, da_r: Tensor | None
) -> dict[str, Tensor]:
    """Compute gradients of both weights by all of their uses, of c_e and of c_r."""
    weights = collapse.CollapseWeights(kept.e, kept.r, *given.score_maps)
    grads = collapse.WeightGradients(d.e, d.r, da_e, da_r)
    return collapse.collapse_gradients(weights, grads, PRODUCTS[given.x.dtype])


@launched(*tt.LENGTHS)
def sum_blocks(
    q, k, d_out, mask, da_e, da_r, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum phi_q d_out^T and d_out, or phi_k d_out^T."""
    program = tl.program_id(0) // 2
    b, h, first, last = tt.share_of_tokens(program, N, H, splits, tokens)
    span, strides = (mask, N, b, h, first, last), (z_strides, d_out_strides)
    if tl.program_id(0) % 2 == 0:
        total, of_bias = _summed_side(
            q, d_out, strides, span, da_e is not None, d_bias is not None,
            P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
        if da_e is not None:
            tt.store_block(da_e + program.to(tl.int64) * (P * C), total, 0, 0, P, C)
        if d_bias is not None:
            tt.store_block(d_bias + program.to(tl.int64) * C, of_bias[None, :], 0, 0, 1, C)
    elif da_r is not None:
        total, _ = _summed_side(
            k, d_out, strides, span, True, False,
            P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
        tt.store_block(da_r + program.to(tl.int64) * (P * C), total, 0, 0, P, C)


@triton.jit
def _summed_side(
    z, d_out, strides, span, OF_A: tl.constexpr, OF_BIAS: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of phi d_out^T over the tokens from first to last, and that of d_out."""
    mask, N, b, h, first, last = span
    z_strides, d_out_strides = strides
    z, d_out = tt.sequence_of(z, z_strides, b, h), tt.sequence_of(d_out, d_out_strides, b, h)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        real = tt.real_tokens(mask, b, N, start, last, BLOCK_N)
        d_rows = tt.load_rows(d_out, start, d_out_strides[1], real, 0, C, BLOCK_C).to(DOT)
        if OF_BIAS:
            groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
            sum_bias += tl.sum(groups, 0)
        if OF_A:
            rows = tt.load_rows(z, start, z_strides[1], real, 0, P, BLOCK_P)
            inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
            base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
            total = tt.product(tl.trans(base), tt.scaled(d_rows, factor).to(DOT), total)
    return total, tl.sum(sum_bias, 0)


@launched(*tt.LENGTHS)
def row_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, d_e, d_r, mask, inverse_n, dq, dk, dh_e,
    dh_r, z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of H_e, or of the keys and of H_r."""
    b, h, first, last = tt.share_of_tokens(tl.program_id(0) // 2, N, H, splits, tokens)
    strides = z_strides, h_strides, d_out_strides, dz_strides, dh_strides
    span, place = (mask, inverse_n, N, H, b, h, first, last), (b * H + h) * (P * S)
    if tl.program_id(0) % 2 == 0:
        moment = tt.load_matrix(d_r + place, 0, 0, P, S, BLOCK_P, BLOCK_S)
        _write_side(
            (q, h_e, d_out, a_e, d_gram_q, dq, dh_e), moment, strides, span,
            P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip
    else:
        moment = tt.load_matrix(d_e + place, 0, 0, P, S, BLOCK_P, BLOCK_S)
        _write_side(
            (k, h_r, d_out, a_r, d_gram_k, dk, dh_r), moment, strides, span,
            P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _write_side(
    side, d_moment, strides, span, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T) + h M^T, and dh = phi M, with M = D / n."""
    z, values, d_out, a, d_gram, dz, d_values = side
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides = strides
    mask, inverse_n, N, H, b, h, first, last = span
    z, dz = tt.sequence_of(z, z_strides, b, h), tt.sequence_of(dz, dz_strides, b, h)
    values = tt.sequence_of(values, value_strides, b, h)
    d_values = tt.sequence_of(d_values, d_value_strides, b, h)
    head = b * H + h
    moment, scale = tt.fitted(d_moment * tl.load(inverse_n + b), DOT)
    if a is not None:
        d_out = tt.sequence_of(d_out, d_out_strides, b, h)
        matrix = tt.load_matrix(a + head * (P * C), 0, 0, P, C, BLOCK_P, BLOCK_C)
        proj, scale_a = tt.fitted(matrix, DOT)
    if d_gram is not None:
        matrix = tt.load_matrix(d_gram + head * (P * P), 0, 0, P, P, BLOCK_P, BLOCK_P)
        both, scale_both = tt.fitted(matrix + tl.trans(matrix), DOT)
    for start in range(first, last, BLOCK_N):
        real = tt.real_tokens(mask, b, N, start, last, BLOCK_N)
        rows = tt.load_rows(z, start, z_strides[1], real, 0, P, BLOCK_P)
        inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
        base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
        d_phi = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
        if d_gram is not None:
            d_phi = tt.scaled(tt.product(base, both, d_phi), factor * scale_both)
        if a is not None:
            d_rows = tt.load_rows(d_out, start, d_out_strides[1], real, 0, C, BLOCK_C).to(DOT)
            d_phi = tt.scaled_product(d_rows, tl.trans(proj), scale_a, d_phi)
        row_values = tt.load_rows(values, start, value_strides[1], real, 0, S, BLOCK_S).to(DOT)
        d_phi = tt.scaled_product(row_values, tl.trans(moment), scale, d_phi)
        dh = tt.product(base, moment, tl.zeros([BLOCK_N, BLOCK_S], tl.float32))
        dh = tt.scaled(dh, factor * scale)
        tt.store_rows(d_values, dh, start, d_value_strides[1], last, 0, S, BLOCK_S)
        d_z = tt.pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        tt.store_rows(dz, d_z, start, dz_strides[1], last, 0, P, BLOCK_P)


@launched("N", "H")
def whole_blocks(
    q, k, h_e, h_r, c_e, c_r, bias, mask, inverse_n, out, gram_q, gram_k, w_e, w_r, a_e, a_r,
    z_strides, h_strides, out_strides, c_e_strides, c_r_strides, N, H,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """W_e, W_r, A_e, A_r, outputs and Gram matrices of one sequence and head."""
    # The last come first: the projection was just before, the cache has their tokens still.
    head = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    b, h = head // H, head % H
    q, k = tt.sequence_of(q, z_strides, b, h), tt.sequence_of(k, z_strides, b, h)
    h_e, h_r = tt.sequence_of(h_e, h_strides, b, h), tt.sequence_of(h_r, h_strides, b, h)
    span = mask, b, N, head, tl.load(inverse_n + b)
    proj_e, scale_e = _collapsed(
        k, h_r, (c_e, w_e, a_e, c_e_strides), z_strides[1], h_strides[1], span,
        P, S, C, MAP_K, DOT, PRECISION, BLOCK_N, BLOCK_P, BLOCK_S, TILE,
    )  # fmt: skip
    proj_r, scale_r = _collapsed(
        q, h_e, (c_r, w_r, a_r, c_r_strides), z_strides[1], h_strides[1], span,
        P, S, C, MAP_Q, DOT, PRECISION, BLOCK_N, BLOCK_P, BLOCK_S, TILE,
    )  # fmt: skip
    primal.attend_tokens(
        q, k, bias, mask, tt.sequence_of(out, out_strides, b, h), gram_q, gram_k,
        proj_e, scale_e, proj_r, scale_r, head, b, z_strides[1], z_strides[1], out_strides[1],
        N, 0, N, 0, True, True, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE, False,
    )  # fmt: skip


@triton.jit
def _collapsed(
    z, values, side, z_stride, value_stride, span, P: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A = W C with W = Phi^T H / n, fitted, and its scale; both W and A are written."""
    mask, b, N, head, inverse_n = span
    c, w, a, c_strides = side
    moment = fused_moment.summed_moment(
        z, values, mask, b, z_stride, value_stride, N, 0, N, 0,
        P, S, FEATURE_MAP, DOT, BLOCK_N, BLOCK_P, BLOCK_S,
    )  # fmt: skip
    weights = moment * inverse_n
    of_c = collapse.load_map(c, c_strides, 0, S, C, BLOCK_S, TILE)
    matrix = tt.product(weights, of_c, tl.zeros([BLOCK_P, TILE], tl.float32), PRECISION)
    tt.store_block(w + head * (P * S), weights, 0, 0, P, S)
    tt.store_block(a + head * (P * C), matrix, 0, 0, P, C)
    return tt.fitted(matrix, DOT)


@launched("N", "H")
def whole_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, w_e, w_r, d_e, d_r, c_e, c_r, mask,
    inverse_n, dq, dk, dh_e, dh_r, dc_e, dc_r, d_bias, z_strides, h_strides, d_out_strides,
    dz_strides, dh_strides, c_e_strides, c_r_strides, N, H, P: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of one sequence and head, and its parts of those of C and the bias."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    strides, span = (z_strides, d_out_strides), (mask, N, b, h, 0, N)
    da, of_bias = _summed_side(
        q, d_out, strides, span, True, d_bias is not None,
        P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    if d_bias is not None:
        tt.store_block(d_bias + head * C, of_bias[None, :], 0, 0, 1, C)
    side = w_e, d_e, c_e, dc_e, c_e_strides
    da = da.to(a_e.dtype.element_ty)
    moment_e = _weight_gradient(da, side, head, P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION)
    da, _ = _summed_side(
        k, d_out, strides, span, True, False, P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    side = w_r, d_r, c_r, dc_r, c_r_strides
    da = da.to(a_r.dtype.element_ty)
    moment_r = _weight_gradient(da, side, head, P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION)
    all_strides = z_strides, h_strides, d_out_strides, dz_strides, dh_strides
    whole = mask, inverse_n, N, H, b, h, 0, N
    _write_side(
        (q, h_e, d_out, a_e, d_gram_q, dq, dh_e), moment_r, all_strides, whole,
        P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip
    _write_side(
        (k, h_r, d_out, a_r, d_gram_k, dk, dh_r), moment_e, all_strides, whole,
        P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def _weight_gradient(
    da, side, head, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D = dA C^T + dW; the part dA^T W of the transpose of dC is written."""
    w, d_w, c, dc, c_strides = side
    weights = tt.load_matrix(w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    d_map = tt.product(tl.trans(da), weights, tl.zeros([BLOCK_C, BLOCK_S], tl.float32), PRECISION)
    tt.store_block(dc + head * (S * C), d_map, 0, 0, C, S)
    total = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    if d_w is not None:
        total += tt.load_matrix(d_w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    of_c = collapse.load_map(c, c_strides, 0, S, C, BLOCK_S, BLOCK_C)
    return tt.product(da, tl.trans(of_c), total, PRECISION)
