r"""YOSO: attention as a sum over the keys that fall into the query's hash bucket.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, R hashes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.masks import zero_padding
from primal_attention.attention.base.qkv import Options, QKVAttention
from primal_attention.attention.base.validation import check_choice, check_sizes
from primal_attention.feature_maps import cosine
from primal_attention.ops.gradients import (
    are_differentiated,
    differentiable_gradients,
    is_transformed,
)
from primal_attention.precision import accumulate, accumulation_dtype, exact

_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of the products that are summed at once


class YosoAttention(QKVAttention):
    r"""You Only Sample (Almost) Once, Zeng et al. 2021: Bernoulli sampling by hashing.

    With unit queries and keys, a hash of $\tau$ random hyperplanes makes q and k collide with
    probability $w_{ij} = (1 - \arccos(q_i^\top k_j) / \pi)^\tau$. The output is the unit vector of

    - ``expectation``: $\sum_j w_{ij} v_j$ (YOSO-E), quadratic in N;
    - ``hashes``: the same sum with $w_{ij}$ estimated by the share of R hashes in which i and j
      collide, linear in N: values are added up bucket by bucket.

    Gradients are the published lower bound, $\partial w_{ij} / \partial (q_i^\top k_j) =
    \frac{\tau}{2} w_{ij}$ with w as in the forward pass: the true derivative is infinite where
    q = k. The published depthwise convolution of the values is left out.

    There is no causal form: sums of a bucket for each prefix would not be linear in N.

    Args:
        estimator: ``expectation`` or ``hashes``.
        num_hashes: Number of hashes R.
        num_bits: Hyperplanes of each hash, the paper's tau.
        **options: Those of :class:`QKVAttention`.

    Hyperplanes are drawn for each forward pass in training; in evaluation they are those of the
    buffer ``planes``, which only ``hashes`` has.
    """

    mechanism = Mechanism(
        "Zeng et al., 2021",
        "N^2, or N by hashes",
        cross=True,
        no_matrix=lambda layer: (
            "outputs of yoso are unit vectors, not linear in the values: it has no matrix"
        ),
    )
    shown = ("estimator", "num_bits")
    contract_exemptions: Mapping[str, str] = {
        "gradients": "the published lower bound; the derivative is infinite where q = k",
        "gradient graphs": "that lower bound is a constant to second derivatives",
    }
    planes: Tensor  # [R, H, C, bits]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        estimator: str = "expectation",
        num_hashes: int = 32,
        num_bits: int = 9,
        **options: Unpack[Options],
    ):
        check_choice("estimator", estimator, ("expectation", "hashes"))
        check_sizes(num_hashes=num_hashes, num_bits=num_bits)
        if num_bits > 15:  # 16-bit codes, and tables of 2^bits rows
            raise ValueError(f"num_bits must be at most 15, got {num_bits}")
        super().__init__(dim, num_heads, **options)
        self.estimator, self.num_bits = estimator, num_bits
        if estimator == "hashes":
            shape = (num_hashes, num_heads, self.head_dim, num_bits)
            self.register_buffer("planes", torch.randn(shape))
            self.contract_exemptions = {
                **self.contract_exemptions,
                "autocast": "rounding moves tokens across hyperplanes, so the estimate is another",
            }

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Sum over the keys and normalise the sum, in the accumulation dtype."""
        q_unit, k_unit = cosine(accumulate(q)), cosine(accumulate(k))
        values = zero_padding(accumulate(v), source_mask)
        if self.estimator == "expectation":
            total = _expected_sums(q_unit, k_unit, values, self.num_bits)
        else:
            planes = torch.randn_like(self.planes) if self.training else self.planes
            codes = _codes(q_unit, planes), _codes(k_unit, planes)
            given = q_unit, k_unit, values, *codes, self.num_bits
            sums: Any = _composition if is_transformed() else _HashedSums.apply
            total = sums(*given)
        return cosine(total).to(v.dtype)


@exact
def _expected_sums(q: Tensor, k: Tensor, v: Tensor, num_bits: int) -> Tensor:
    """The sums [B, N, H, C] over all keys, weighted by the probability of a collision."""
    product = einsum(q, k, "b n h c, b t h c -> b h n t")
    fixed = product.detach()
    weights = (1.0 - fixed.clamp(-1.0, 1.0).acos() / math.pi) ** num_bits
    weights = weights * (1.0 + num_bits / 2 * (product - fixed))  # the published gradient
    return einsum(weights, v, "b h n t, b t h c -> b n h c")


@torch.no_grad()
@exact
def _codes(z: Tensor, planes: Tensor) -> Tensor:
    """The bucket of each token in each hash, int16 [R, B, N, H]."""
    powers = 2 ** torch.arange(planes.shape[-1], dtype=torch.int16, device=z.device)
    sides = (einsum(z, plane.to(z.dtype), "b n h c, h c s -> b n h s") > 0 for plane in planes)
    return torch.stack([(side * powers).sum(-1, dtype=torch.int16) for side in sides])


@exact
def _sums_of_buckets(v: Tensor, q_codes: Tensor, k_codes: Tensor, num_bits: int) -> Tensor:
    """The sums [B, N, H, C] over the keys that collide, averaged over the hashes."""
    out = v.new_zeros(*q_codes.shape[1:], v.shape[-1], dtype=accumulation_dtype(v.dtype))
    for q_rows, k_rows, size in _rows(q_codes, k_codes, num_bits):
        out += _bucket_sums(v, k_rows, size)[q_rows]
    return out.div_(len(q_codes))


@exact
def _gradients_of_buckets(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, num_bits: int, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""$dq_i = \frac{\tau}{2} \sum_j w_{ij} (do_i^\top v_j) k_j$, dk alike, and dv."""
    dq, dk, dv = (torch.zeros_like(z) for z in (q, k, v))
    for q_rows, k_rows, size in _rows(q_codes, k_codes, num_bits):
        dv += _bucket_sums(d_out, q_rows, size)[k_rows]
        dq += _weighted_sums(d_out, q_rows, v, k, k_rows, size)
        dk += _weighted_sums(v, k_rows, d_out, q, q_rows, size)
    R = len(q_codes)
    return dq.mul_(num_bits / 2 / R), dk.mul_(num_bits / 2 / R), dv.div_(R)


def _rows(q_codes: Tensor, k_codes: Tensor, num_bits: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """For each hash the row of a table [B, H, 2^bits] that each token belongs to."""
    B, _, H = q_codes.shape[1:]
    size = B * H << num_bits
    first = torch.arange(0, size, 1 << num_bits, device=q_codes.device).view(B, 1, H)
    for q_code, k_code in zip(q_codes, k_codes, strict=True):
        yield q_code + first, k_code + first, size


def _bucket_sums(z: Tensor, rows: Tensor, size: int) -> Tensor:
    """Sums [size, C] of the tokens z [B, N, H, C] of each row, bit for bit repeatable."""
    z, rows = z.flatten(0, 2), rows.flatten()
    table = z.new_zeros(size, z.shape[-1])
    if z.is_cuda:  # where scatter_add_ adds in any order
        return table.index_put_((rows,), z, accumulate=True)
    return table.scatter_add_(0, rows[:, None].expand_as(z), z)


def _weighted_sums(
    left: Tensor, left_rows: Tensor, right: Tensor, z: Tensor, right_rows: Tensor, size: int
) -> Tensor:
    r"""$\sum_j (left_i^\top right_j) z_j$ over the j in the row of i, like left.

    $= \sum_c left_{ic} (\sum_j right_{jc} z_j)$: the inner sums are taken for a few channels c at
    once, into tables of rows (row of i, c), of which the outer sum is an embedding bag.
    """
    total, C = left.new_zeros(left_rows.numel(), z.shape[-1]), z.shape[-1]
    elements = _ELEMENTS.get(z.device.type, _ELEMENTS["cuda"])
    size_of_slice = max(1, elements // max(z.numel(), 1))
    for start in range(0, C, size_of_slice):
        some = slice(start, start + size_of_slice)
        weights = left[..., some].flatten(0, 2)
        products = right[..., some, None] * z[..., None, :]
        table = _bucket_sums(products.flatten(-2), right_rows, size).view(-1, C)
        channels = torch.arange(weights.shape[1], device=z.device)
        bags = left_rows.view(-1, 1) * weights.shape[1] + channels
        total += F.embedding_bag(bags, table, mode="sum", per_sample_weights=weights)
    return total.view(*left.shape[:-1], C)


class _HashedSums(torch.autograd.Function):
    """Sums over the keys that collide; their gradients are the published ones."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, num_bits: int
    ) -> Tensor:
        ctx.num_bits = num_bits
        ctx.save_for_backward(q, k, v, q_codes, k_codes)
        return _sums_of_buckets(v, q_codes, k_codes, num_bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, q_codes, k_codes = ctx.saved_tensors
        options: tuple[Any, ...] = (q_codes, k_codes, ctx.num_bits)
        found: Sequence[Tensor | None]
        if are_differentiated():
            found = differentiable_gradients(
                lambda *given: [_composition(*given, *options)], tensors, gradients
            )
        else:
            found = _gradients_of_buckets(*tensors, *options, *gradients)
        return (*found, None, None, None)


@exact
def _composition(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, num_bits: int
) -> Tensor:
    """The sums with the N x N matrix of weights, whose derivative is the published gradient."""
    pairs = zip(q_codes.transpose(2, 3), k_codes.transpose(2, 3), strict=True)
    shares = sum((of_q[..., None] == of_k[..., None, :]).to(q.dtype) for of_q, of_k in pairs)
    product = einsum(q, k, "b n h c, b t h c -> b h n t")
    weights = shares * (1.0 + num_bits / 2 * (product - product.detach())) / len(q_codes)
    total: Tensor = einsum(weights, v, "b h n t, b t h c -> b n h c")
    return total
