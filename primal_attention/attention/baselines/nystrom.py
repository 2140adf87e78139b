r"""Nystromformer: softmax attention by the Nystrom method, through segment means.

Letters: B batch, N tokens, H heads, C head dim, M landmarks or segments.
"""

from typing import Unpack

import torch
from einops import einsum
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.qkv import Options, QKVAttention
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.precision import accumulate, exact


class NystromAttention(QKVAttention):
    r"""Softmax attention through M landmarks, Xiong et al. 2021.

    $Y = \mathrm{softmax}(Q \tilde K^\top)\; A^+\; \mathrm{softmax}(\tilde Q K^\top)\, V$ with
    $A = \mathrm{softmax}(\tilde Q \tilde K^\top)$, all products divided by $\sqrt C$. The landmarks
    $\tilde Q, \tilde K$ are the means over M segments of the *real* tokens, $A^+$ is iterated in at
    least float32. With a kernel size, a depthwise convolution of the values is added, one filter a
    head, over the real tokens in order.

    A sequence of at most M real tokens gets exact softmax attention: each landmark is a token.

    Differences from the published code: segments differ in length by at most one token where M
    does not divide their number (token i belongs to segment i M // n); the iteration starts from
    the norm of each matrix, not from the largest of the batch, which would mix sequences.

    Args:
        num_landmarks: Number of landmarks M.
        num_iterations: Iterations of the pseudo-inverse.
        conv_kernel_size: Odd size of the convolution of the values (33 as published), or None.
        **options: Those of :class:`QKVAttention`; ``causal`` is not possible.
    """

    mechanism = Mechanism("Xiong et al., 2021", "N", fused="SDPA")
    shown = ("num_landmarks",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        num_iterations: int = 6,
        conv_kernel_size: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        check_sizes(
            num_landmarks=num_landmarks,
            num_iterations=num_iterations,
            conv_kernel_size=conv_kernel_size,
        )
        self.num_landmarks, self.num_iterations = num_landmarks, num_iterations
        self.conv = None
        if conv_kernel_size is not None:
            if conv_kernel_size % 2 == 0:
                raise ValueError(f"conv_kernel_size must be odd, got {conv_kernel_size}")
            self.conv = nn.Conv2d(
                num_heads,
                num_heads,
                (conv_kernel_size, 1),
                padding=(conv_kernel_size // 2, 0),
                groups=num_heads,
                bias=False,
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Two fused attentions, from landmarks to tokens and back, around the small inverse."""
        if q.shape[1] <= self.num_landmarks:
            out = softmax_attention(q, k, v, mask, mask=mask)
        else:
            out = self._through_landmarks(q, k, v, mask)
        if self.conv is None:
            return out
        order = token_order(v, mask)
        convolved = self.conv(order.pack(zero_padding(v, mask)).transpose(1, 2))
        return out + order.unpack(convolved.transpose(1, 2))

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        segments = token_segments(q, mask, self.num_landmarks)
        means = segment_means(torch.cat([q, k, v], dim=-1), segments)
        q_means, k_means, v_means = means.chunk(3, dim=-1)  # [B, M, H, C]
        values = softmax_attention(q_means, k, v, mask)  # [B, M, H, C]
        values = _times_inverse(q_means, k_means, values, self.num_iterations)
        if mask is None:
            return softmax_attention(q, k_means, values)
        exact_rows = (mask.sum(1) <= self.num_landmarks)[:, None, None, None]
        values = torch.where(exact_rows, v_means, values)
        return softmax_attention(q, k_means, values, segments.any(2), mask=mask)


@exact
def _times_inverse(q: Tensor, k: Tensor, values: Tensor, num_iterations: int) -> Tensor:
    """The pseudo-inverse of the landmarks' attention times values, all [B, M, H, C]."""
    q, k, wide = (accumulate(z).transpose(1, 2) for z in (q, k, values))
    matrix = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
    z = pseudo_inverse(matrix, num_iterations - 1)
    y = -matrix @ z
    out = z @ _polynomial(y, wide, y @ wide)  # the last iteration, of fewer columns
    return out.transpose(1, 2).to(values.dtype)


def pseudo_inverse(matrix: Tensor, num_iterations: int) -> Tensor:
    r"""Approximate the inverse of matrices [..., M, M] with positive entries and row sums 1.

    $Z \leftarrow \frac14 Z (13 I - AZ (15 I - AZ (7 I - AZ)))$ from
    $Z = A^\top / (|A|_1 |A|_\infty)$, where the second norm is 1: eq. (11) of Xiong et al. 2021.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    z, minus_a = matrix.mT / matrix.sum(-2).amax(-1)[..., None, None], -matrix
    for _ in range(num_iterations):
        y = minus_a @ z
        z = z @ _polynomial(y, identity, y)
    return z


def _polynomial(y: Tensor, x: Tensor, yx: Tensor) -> Tensor:
    r"""$\frac14 (13 I + Y (15 I + Y (7 I + Y)))\, X$ from the product YX."""
    inner = torch.add(1.75 * x, yx, alpha=0.25)
    return torch.add(y @ torch.add(y @ inner, x, alpha=3.75), x, alpha=3.25)


def token_segments(x: Tensor, mask: Tensor | None, num_segments: int) -> Tensor:
    """Divide the tokens of x [B, N, ...] into segments, bool [B, M, N].

    The i-th of n real tokens is in segment i M // n: no segment is empty where n is at least M, and
    none holds more than one token where n is at most M.
    """
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    place, num_real = mask.cumsum(1) - 1, mask.sum(1, keepdim=True).clamp(min=1)
    of_token = (place * num_segments // num_real)[:, None]
    segment = torch.arange(num_segments, device=x.device)[:, None]
    return (of_token == segment) & mask[:, None]


@exact
def segment_means(z: Tensor, segments: Tensor) -> Tensor:
    """Means [B, M, H, C] of the tokens [B, N, H, C] of each segment; zero where it has none."""
    wide = accumulate(z)
    sums = einsum(segments.to(wide.dtype), wide, "b m n, b n h c -> b m h c")
    return (sums / segments.sum(2).clamp(min=1)[:, :, None, None]).to(z.dtype)
