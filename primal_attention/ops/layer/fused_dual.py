"""Dual weights in both directions as fused passes over rows in which q, k, H_e, H_r stand together.

    W_{e|X} = Phi_k^T H_r / n        W_{r|X} = Phi_q^T H_e / n

Backward there are two passes over the tokens: the first sums the gradients of A, from which those
of the weights follow; the second writes the gradients of the rows, each by both of its uses at
once. Neighbouring programs have the two sides of the same tokens, so that the second finds d_out in
the cache. Of short sequences one program has all tokens of a sequence and head, in one pass either
way: the tokens are read a second time from the cache.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, n tokens of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.layer.eager import LayerInputs
from primal_attention.ops.primal.eager import Attended, MomentInputs
from primal_attention.ops.primal.fused import (
    BACKWARD,
    FORWARD,
    InputGradients,
    OutputGradients,
    attend,
    attend_tokens,
    write_gradients,
)
from primal_attention.ops.primal.fused_collapse import (
    WeightGradients,
    Weights,
    collapse,
    collapse_gradients,
    load_map,
    map_strides,
)
from primal_attention.ops.primal.fused_moment import (
    MomentGradients,
    add_moments,
    pull_back_moment,
    summed_moment,
)
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import DOTS, PRODUCTS, padded
from primal_attention.ops.triton.launcher import launched
from primal_attention.ops.triton.sums import add_up, summed
from primal_attention.precision import operand_dtype

# By the largest padded width. The first pass of the backward pass, and the second, which has no
# sums and thus as many programs as it likes.
SUMS, ROWS = (
    {
        dtype: {at: c._replace(**sizes) for at, c in table.items()}
        for dtype, table in BACKWARD.items()
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
    """What the forward pass leaves for the backward pass; empty where there is none."""

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
    def outputs(self) -> OutputGradients:
        """Those of outputs and Gram matrices."""
        return OutputGradients(*self[:3])


def heads_of(given: LayerInputs, rows: Tensor) -> Heads:
    """What stands side by side in the rows [B, N, 2 H P + 2 H S]."""
    of_q, of_h = given.num_heads * given.feature_dim, given.num_heads * given.num_directions
    sides = rows.split((of_q, of_q, of_h, of_h), -1)
    return Heads(*(torch.unflatten(side, -1, (given.num_heads, -1)) for side in sides))


def attended(given: LayerInputs, q: Tensor, k: Tensor, a_e: Tensor, a_r: Tensor) -> Attended:
    """What a pass over queries and keys is given, with A of the sides that are output."""
    e = None if given.scores == "r" else a_e
    r = None if given.scores == "e" else a_r
    return Attended(q, k, e, r, given.score_bias, given.token_mask, *given.maps)


def takes_two_passes(given: LayerInputs) -> bool:
    """Whether both gradients of a token are written at once, so that they may take its place."""
    return _width(given) in SUMS[given.x.dtype]


def _width(given: LayerInputs) -> int:
    return padded(max(given.feature_dim, given.num_directions, len(given.score_weight)))


def _is_short(given: LayerInputs) -> bool:
    """Whether a program is to have a whole sequence and head."""
    (B, N, _), both = given.x.shape, given.scores == "both"
    taken = both and given.x.dtype in WHOLE and takes_two_passes(given)
    return taken and N <= SHORT and B * given.num_heads >= MANY


def forward_dual(
    given: LayerInputs, rows: Tensor, inverse_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and Gram matrices, W_e and W_r, A_e and A_r; empty where they are not wanted."""
    heads = heads_of(given, rows)
    if _is_short(given):
        return _forward_whole(given, heads, inverse_n)
    e, r, a_e, a_r = _weights(given, heads, inverse_n)
    rows_of = attended(given, *heads[:2], a_e, a_r)
    return *attend(rows_of, gram_q=given.grams, gram_k=given.grams), e, r, a_e, a_r


def _weights(
    given: LayerInputs, heads: Heads, inverse_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e of the keys and H_r, W_r of the queries and H_e, A_e and A_r (empty if not output)."""
    (B, _, H, P), S = heads.q.shape, heads.h_e.shape[-1]
    e, r = (heads.q.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    map_q, map_k = given.maps
    mask = given.token_mask
    add_moments(MomentInputs(heads.k, heads.h_r, mask, map_k), e, inverse_n=inverse_n)
    add_moments(MomentInputs(heads.q, heads.h_e, mask, map_q), r, inverse_n=inverse_n)
    of_a = operand_dtype(heads.q.dtype, torch.float32)
    precision = PRODUCTS[heads.q.dtype]
    return e, r, *collapse(Weights(e, r, *given.score_maps), precision, of_a)


def _forward_whole(
    given: LayerInputs, heads: Heads, inverse_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same in one pass."""
    q, (c_e, c_r) = heads.q, given.score_maps
    assert c_e is not None
    (B, N, H, P), S, C = q.shape, heads.h_e.shape[-1], c_e.shape[1]
    config = FORWARD[q.dtype][_width(given)]
    of_sums, of_a = torch.float32, operand_dtype(q.dtype, torch.float32)
    out = q.new_empty((B, N, H, C))
    shape = (B, H, P, P) if given.grams else (0,)
    gram_q, gram_k = (q.new_empty(shape, dtype=of_sums) for _ in range(2))
    e, r = (q.new_empty((B, H, P, S), dtype=of_sums) for _ in range(2))
    a_e, a_r = (q.new_empty((B, H, P, C), dtype=of_a) for _ in range(2))
    grams = (gram_q, gram_k) if given.grams else (None, None)
    whole_blocks[(B * H,)](
        *heads, c_e, c_r, *launch.contiguous(given.score_bias), launch.mask_bytes(given.token_mask),
        inverse_n, out, *grams, e, r, a_e, a_r,
        *map(launch.strides, (q, heads.h_e, out)), map_strides(c_e), map_strides(c_r), N, H,
        P, S, C, *given.maps, DOTS[q.dtype], PRODUCTS[q.dtype],
        config.block, padded(P), padded(S), padded(max(P, C)), **config.launch,
    )  # fmt: skip
    return out, gram_q, gram_k, e, r, a_e, a_r


def write_dual_gradients(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    d_heads: Heads,  # written
    d_bias: Tensor | None,  # written
) -> dict[str, Tensor]:
    """Write the gradients of the rows and of the bias; those of c_e and c_r come back."""
    heads = heads_of(given, kept.rows)
    if not takes_two_passes(given):
        return _write_apart(given, kept, d, heads, d_heads, d_bias)
    if d.out is not None and _is_short(given):
        return _write_whole(given, kept, d, heads, d_heads, d_bias)
    da_e, da_r = _sum_sides(given, kept, d.out, heads, d_bias)
    found = _weight_gradients(given, kept, d, da_e, da_r)
    _write_rows(given, kept, d, heads, (found.pop("w_e"), found.pop("w_r")), d_heads)
    return found


def _write_whole(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    heads: Heads,
    d_heads: Heads,
    d_bias: Tensor | None,
) -> dict[str, Tensor]:
    """All gradients of the rows and of the bias in one pass; those of c_e and c_r come back."""
    c_e, c_r = given.score_maps
    assert d.out is not None
    assert c_e is not None
    assert c_r is not None
    (B, N, H, P), S, q = heads.q.shape, heads.h_e.shape[-1], heads.q
    d_out, C = launch.readable(d.out), d.out.shape[-1]
    config, stages = WHOLE[q.dtype][_width(given)], SUMS[q.dtype][_width(given)].num_stages
    parts = [kept.e.new_empty(B * H, C, S) for _ in range(2)]
    bias_parts = None if d_bias is None else kept.e.new_empty(B * H, C)
    whole_gradient_blocks[(B * H,)](
        *heads, d_out,
        *launch.contiguous(kept.a_e, kept.a_r, d.gram_q, d.gram_k),
        *launch.contiguous(kept.e, kept.r, d.e, d.r), c_e, c_r,
        launch.mask_bytes(given.token_mask), kept.inverse_n, *d_heads, *parts, bias_parts,
        *map(launch.strides, (q, heads.h_e, d_out, d_heads.q, d_heads.h_e)),
        map_strides(c_e), map_strides(c_r), N, H,
        P, S, C, *given.maps, DOTS[q.dtype], PRODUCTS[q.dtype],
        config.block, padded(P), padded(S), padded(C), stages, **config.launch,
    )  # fmt: skip
    dc_e, dc_r = torch.empty_like(c_e), torch.empty_like(c_r)
    add_up(*zip((*parts, bias_parts), (dc_e.mT, dc_r.mT, d_bias), strict=True))
    return {"c_e": dc_e, "c_r": dc_r}


def _sum_sides(
    given: LayerInputs, kept: Kept, d_out: Tensor | None, heads: Heads, d_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A_e and A_r, and that of the bias."""
    if d_out is None:
        if d_bias is not None:
            d_bias.zero_()
        return None, None
    q, d_out, (_, N, H, P) = heads.q, launch.readable(d_out), heads.q.shape
    C, config = d_out.shape[-1], SUMS[q.dtype][_width(given)]
    shares = launch.shares_of(q, config)
    sides = attended(given, *heads[:2], kept.a_e, kept.a_r)[2:4]
    da_e, da_r = (None if a is None else torch.empty_like(a) for a in sides)
    with summed(q, shares, da_e, da_r, d_bias) as sums:
        sum_blocks[(2 * shares.programs,)](
            q, heads.k, d_out, launch.mask_bytes(given.token_mask), *sums,
            launch.strides(q), launch.strides(d_out), N, H, shares.splits, shares.tokens,
            P, C, *given.maps, DOTS[q.dtype],
            config.block, padded(P), padded(C), config.num_stages, **config.launch,
        )  # fmt: skip
    return da_e, da_r


def _write_rows(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    heads: Heads,
    d_weights: tuple[Tensor, Tensor],
    d_heads: Heads,
) -> None:
    """The gradients of all that stands in the rows."""
    q, (_, N, H, P), S = heads.q, heads.q.shape, heads.h_e.shape[-1]
    d_out = None if d.out is None else launch.readable(d.out)
    C = 0 if d_out is None else d_out.shape[-1]
    config = ROWS[q.dtype][_width(given)]
    shares = launch.shares_of(q, config)
    sides = attended(given, *heads[:2], kept.a_e, kept.a_r)[2:4]
    sides = (None, None) if d_out is None else sides
    row_gradient_blocks[(2 * shares.programs,)](
        *heads, d_out, *launch.contiguous(*sides, d.gram_q, d.gram_k), *d_weights,
        launch.mask_bytes(given.token_mask), kept.inverse_n, *d_heads,
        *map(launch.strides, (q, heads.h_e, d_out, d_heads.q, d_heads.h_e)),
        N, H, shares.splits, shares.tokens,
        P, S, C, *given.maps, DOTS[q.dtype],
        config.block, padded(P), padded(S), padded(max(C, 1)), **config.launch,
    )  # fmt: skip


def _write_apart(
    given: LayerInputs,
    kept: Kept,
    d: LayerGradients,
    heads: Heads,
    d_heads: Heads,
    d_bias: Tensor | None,
) -> dict[str, Tensor]:
    """For wide heads: the gradients by the attention are written, those by the weights added."""
    rows_of = attended(given, *heads[:2], kept.a_e, kept.a_r)
    mask, (map_q, map_k) = given.token_mask, given.maps
    da_e, da_r = (None if a is None else torch.empty_like(a) for a in rows_of[2:4])
    write_gradients(rows_of, d.outputs, InputGradients(*d_heads[:2], da_e, da_r, d_bias))
    if d.out is None:
        da_e = da_r = None
    found, by_n = _weight_gradients(given, kept, d, da_e, da_r), kept.inverse_n
    for name, rows, dz, dh in (
        ("w_e", MomentInputs(heads.k, heads.h_r, mask, map_k), d_heads.k, d_heads.h_r),
        ("w_r", MomentInputs(heads.q, heads.h_e, mask, map_q), d_heads.q, d_heads.h_e),
    ):
        into = MomentGradients(dz, dh, add=True)
        pull_back_moment(rows, found.pop(name), None, into, inverse_n=by_n)
    return found


def _weight_gradients(
    given: LayerInputs, kept: Kept, d: LayerGradients, da_e: Tensor | None, da_r: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of both weights by all of their uses, of c_e and of c_r."""
    weights = Weights(kept.e, kept.r, *given.score_maps)
    grads = WeightGradients(d.e, d.r, da_e, da_r)
    return collapse_gradients(weights, grads, PRODUCTS[given.x.dtype])


@launched
@triton.jit(do_not_specialize=tt.LENGTHS)
def sum_blocks(
    q, k, d_out, mask, da_e, da_r, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of phi_q d_out^T and of d_out, or of phi_k d_out^T."""
    if tl.program_id(0) % 2 == 0:
        _side_sums(
            q, d_out, mask, da_e, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
            P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
    else:
        _side_sums(
            k, d_out, mask, da_r, None, z_strides, d_out_strides, N, H, splits, tokens,
            P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip


@triton.jit
def _side_sums(
    z, d_out, mask, da, d_bias, z_strides, d_out_strides, N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) // 2
    b, h, first, last = tt.share_of_tokens(program, N, H, splits, tokens)
    z, d_out = tt.sequence_of(z, z_strides, b, h), tt.sequence_of(d_out, d_out_strides, b, h)
    total, of_bias = summed_side(
        z, d_out, mask, b, z_strides[1], d_out_strides[1], N, first, last,
        da is not None, d_bias is not None, P, C, FEATURE_MAP, DOT,
        BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    if da is not None:
        tt.store_matrix(da + program.to(tl.int64) * (P * C), total, 0, P, C)
    if d_bias is not None:
        tt.store_matrix(d_bias + program.to(tl.int64) * C, of_bias[None, :], 0, 1, C)


@triton.jit
def summed_side(
    z, d_out, mask, b, z_stride, d_out_stride, N, first, last,
    OF_A: tl.constexpr, OF_BIAS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of phi d_out^T over the tokens from first to last, and that of d_out."""
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        real = tt.real_tokens(mask, b, N, start, last, BLOCK_N)
        d_rows = tt.load_rows(d_out, start, d_out_stride, real, 0, C, BLOCK_C).to(DOT)
        if OF_BIAS:
            groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
            sum_bias += tl.sum(groups, 0)
        if OF_A:
            rows = tt.load_rows(z, start, z_stride, real, 0, P, BLOCK_P)
            inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
            base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
            total = tt.product(tl.trans(base), tt.scaled(d_rows, factor).to(DOT), total)
    return total, tl.sum(sum_bias, 0)


@launched
@triton.jit(do_not_specialize=tt.LENGTHS)
def row_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, d_e, d_r, mask, inverse_n,
    dq, dk, dh_e, dh_r,
    z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of H_e, or of the keys and of H_r."""
    if tl.program_id(0) % 2 == 0:
        _side_gradients(
            q, h_e, d_out, a_e, d_gram_q, d_r, mask, inverse_n, dq, dh_e,
            z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
            P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip
    else:
        _side_gradients(
            k, h_r, d_out, a_r, d_gram_k, d_e, mask, inverse_n, dk, dh_r,
            z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, splits, tokens,
            P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _side_gradients(
    z, values, d_out, a, d_gram, d_moment, mask, inverse_n, dz, d_values,
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides, N, H, splits, tokens,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    b, h, first, last = tt.share_of_tokens(tl.program_id(0) // 2, N, H, splits, tokens)
    moment = tt.load_matrix(d_moment + (b * H + h) * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    write_side(
        z, values, d_out, a, d_gram, moment, mask, inverse_n, dz, d_values,
        z_strides, value_strides, d_out_strides, dz_strides, d_value_strides,
        N, H, b, h, first, last,
        P, S, C, FEATURE_MAP, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def write_side(
    z, values, d_out, a, d_gram, d_moment, mask, inverse_n, dz, d_values,
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides,
    N, H, b, h, first, last,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T) + h M^T, and dh = phi M, with M = D / n.

    Of the tokens from first to last of one sequence and head.
    """
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


@launched
@triton.jit(do_not_specialize=["N", "H"])
def whole_blocks(
    q, k, h_e, h_r, c_e, c_r, bias, mask, inverse_n, out, gram_q, gram_k, w_e, w_r, a_e, a_r,
    z_strides, h_strides, out_strides, c_e_strides, c_r_strides, N, H,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """W_e, W_r, A_e, A_r, outputs and Gram matrices of one sequence and head.

    The last come first: the projection was just before, so that the cache has their tokens still.
    """
    head = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    b, h = head // H, head % H
    q, k = tt.sequence_of(q, z_strides, b, h), tt.sequence_of(k, z_strides, b, h)
    h_e, h_r = tt.sequence_of(h_e, h_strides, b, h), tt.sequence_of(h_r, h_strides, b, h)
    share = tl.load(inverse_n + b)
    of_k = summed_moment(
        k, h_r, mask, b, z_strides[1], h_strides[1], N, 0, N, 0,
        P, S, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S,
    )  # fmt: skip
    proj_e, scale_e = _collapsed(
        of_k * share, c_e, w_e, a_e, c_e_strides, head, P, S, C, BLOCK_P, BLOCK_S, TILE, DOT,
        PRECISION,
    )  # fmt: skip
    of_q = summed_moment(
        q, h_e, mask, b, z_strides[1], h_strides[1], N, 0, N, 0,
        P, S, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S,
    )  # fmt: skip
    proj_r, scale_r = _collapsed(
        of_q * share, c_r, w_r, a_r, c_r_strides, head, P, S, C, BLOCK_P, BLOCK_S, TILE, DOT,
        PRECISION,
    )  # fmt: skip
    attend_tokens(
        q, k, bias, mask, tt.sequence_of(out, out_strides, b, h), gram_q, gram_k,
        proj_e, scale_e, proj_r, scale_r, head, b, z_strides[1], z_strides[1], out_strides[1],
        N, 0, N, 0,
        True, True, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE, False,
    )  # fmt: skip


@triton.jit
def _collapsed(
    weights, c, w, a, c_strides, head,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A = W C, fitted, and its scale; both W and A are written."""
    of_c = load_map(c, c_strides, 0, S, C, BLOCK_S, TILE)
    matrix = tt.product(weights, of_c, tl.zeros([BLOCK_P, TILE], tl.float32), PRECISION)
    tt.store_block(w + head * (P * S), weights, 0, 0, P, S)
    tt.store_block(a + head * (P * C), matrix, 0, 0, P, C)
    return tt.fitted(matrix, DOT)


@launched
@triton.jit(do_not_specialize=["N", "H"])
def whole_gradient_blocks(
    q, k, h_e, h_r, d_out, a_e, a_r, d_gram_q, d_gram_k, w_e, w_r, d_e, d_r, c_e, c_r,
    mask, inverse_n, dq, dk, dh_e, dh_r, dc_e, dc_r, d_bias,
    z_strides, h_strides, d_out_strides, dz_strides, dh_strides, c_e_strides, c_r_strides, N, H,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of one sequence and head, and its parts of those of C and the bias."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    d_rows, rows = tt.sequence_of(d_out, d_out_strides, b, h), tt.sequence_of(q, z_strides, b, h)
    da, of_bias = summed_side(
        rows, d_rows, mask, b, z_strides[1], d_out_strides[1], N, 0, N,
        True, d_bias is not None, P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    if d_bias is not None:
        tt.store_matrix(d_bias + head * C, of_bias[None, :], 0, 1, C)
    moment_e = _weight_gradient(
        da.to(a_e.dtype.element_ty), w_e, d_e, c_e, dc_e, c_e_strides, head,
        P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION,
    )  # fmt: skip
    rows = tt.sequence_of(k, z_strides, b, h)
    da, _ = summed_side(
        rows, d_rows, mask, b, z_strides[1], d_out_strides[1], N, 0, N,
        True, False, P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, STAGES,
    )  # fmt: skip
    moment_r = _weight_gradient(
        da.to(a_r.dtype.element_ty), w_r, d_r, c_r, dc_r, c_r_strides, head,
        P, S, C, BLOCK_P, BLOCK_S, BLOCK_C, PRECISION,
    )  # fmt: skip
    write_side(
        q, h_e, d_out, a_e, d_gram_q, moment_r, mask, inverse_n, dq, dh_e,
        z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, b, h, 0, N,
        P, S, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip
    write_side(
        k, h_r, d_out, a_r, d_gram_k, moment_e, mask, inverse_n, dk, dh_r,
        z_strides, h_strides, d_out_strides, dz_strides, dh_strides, N, H, b, h, 0, N,
        P, S, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def _weight_gradient(
    da, w, d_w, c, dc, c_strides, head,
    P: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D = dA C^T + dW; the part dA^T W of the transpose of dC is written."""
    weights = tt.load_matrix(w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    d_map = tt.product(tl.trans(da), weights, tl.zeros([BLOCK_C, BLOCK_S], tl.float32), PRECISION)
    tt.store_block(dc + head * (S * C), d_map, 0, 0, C, S)
    total = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    if d_w is not None:
        total += tt.load_matrix(d_w + head * (P * S), 0, 0, P, S, BLOCK_P, BLOCK_S)
    of_c = load_map(c, c_strides, 0, S, C, BLOCK_S, BLOCK_C)
    return tt.product(da, tl.trans(of_c), total, PRECISION)
