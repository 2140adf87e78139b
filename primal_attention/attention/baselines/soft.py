r"""SOFT: attention by a Gaussian kernel, without softmax.

Letters: B batch, N tokens, H heads, C head dim, M landmarks.
"""

import math
from typing import Unpack

import torch
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.qkv import Options, SharedQKAttention
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.nystrom import segment_means, token_segments
from primal_attention.precision import accumulate, exact


class SoftAttention(SharedQKAttention):
    r"""Softmax-free attention with linear complexity, Lu et al. 2021.

    $o_i = \sum_j S_{ij} v_j$ with $S_{ij} = \exp(-|q_i - q_j|^2 / (2 \sqrt C))$, of low rank by the
    Nystrom method: $\hat S = P^\top A^+ P$, where A is the kernel of M landmarks with each other
    and P that of landmarks and tokens. The landmarks are means over M segments of the *real*
    tokens. $A^+$ comes from Newton iterations $Y \leftarrow 2 Y - Y A Y$ in at least float32; its
    gradient is the published closed form $-Y^\top dY\, Y^\top$, which needs none of them: that of
    the inverse itself, to which the iterations have to come near. So is the second derivative.

    A sequence of at most M real tokens gets the exact kernel: each landmark is a token, and
    $S S^{-1} S = S$. Queries are keys, so there is no ``k_proj`` and no cross-attention; and
    neither a causal form, since segments would contain the future.

    Differences from the published code: it learns the landmarks by a convolution over the image,
    a normalisation and GELU (the paper also pools), and starts the iteration from
    $2 A / |A|_1^2$ with the largest norm of the batch. That mixes sequences, and does not converge
    where all tokens are equal; here it starts from $A / |A|_1^2$ of each matrix.

    Args:
        num_landmarks: Number of landmarks M.
        num_iterations: Newton iterations of the pseudo-inverse.
        **options: Those of :class:`QKVAttention`; ``causal`` is not possible.
    """

    mechanism = Mechanism("Lu et al., 2021", "N")
    shown = ("num_landmarks",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 49,
        num_iterations: int = 20,
        **options: Unpack[Options],
    ):
        check_sizes(num_landmarks=num_landmarks, num_iterations=num_iterations)
        super().__init__(dim, num_heads, **options)
        self.num_landmarks, self.num_iterations = num_landmarks, num_iterations

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Compute all pairs where the tokens are few, go through the landmarks otherwise."""
        if q.shape[1] <= self.num_landmarks:
            return _all_pairs(q, zero_padding(v, mask))
        segments = token_segments(q, mask, self.num_landmarks)
        return _through_landmarks(q, zero_padding(v, mask), segments, self.num_iterations)


@exact
def _all_pairs(q: Tensor, v: Tensor) -> Tensor:
    q = accumulate(q)
    return einsum(_gaussian(q, q), accumulate(v), "b h n t, b t h c -> b n h c").to(v.dtype)


@exact
def _through_landmarks(q: Tensor, v: Tensor, segments: Tensor, num_iterations: int) -> Tensor:
    """Outputs [B, N, H, C]; the segments are bool [B, M, N], padded tokens are in none."""
    q, values = accumulate(q), accumulate(v)
    used = segments.any(2)[:, None, :, None]  # [B, 1, M, 1]: fewer tokens than segments
    means = segment_means(q, segments)
    to_tokens = torch.where(used, _gaussian(means, q), 0.0)  # [B, H, M, N]
    among = torch.where(used & used.mT, _gaussian(means, means), 0.0)
    sums = einsum(to_tokens, values, "b h m n, b n h c -> b h m c")
    sums = newton_inverse(among, num_iterations) @ sums
    few = (segments.sum((1, 2)) <= segments.shape[1])[:, None, None, None]
    sums = torch.where(few, segment_means(values, segments).transpose(1, 2), sums)
    return einsum(to_tokens, sums, "b h m n, b h m c -> b n h c").to(v.dtype)


def _gaussian(a: Tensor, b: Tensor) -> Tensor:
    r"""$\exp(-|a_i - b_j|^2 / (2 \sqrt C))$ of all pairs, [B, H, N, T]."""
    product = einsum(a, b, "b n h c, b t h c -> b h n t")
    a_square, b_square = (z.square().sum(-1).transpose(1, 2) for z in (a, b))
    distance = (a_square[..., None] + b_square[..., None, :] - 2.0 * product).clamp(min=0.0)
    return (distance / (-2.0 * math.sqrt(a.shape[-1]))).exp()


def newton_inverse(matrix: Tensor, num_iterations: int) -> Tensor:
    """Pseudo-invert symmetric matrices [..., M, M] whose row sums are at least 1, or 0."""
    fixed = matrix.detach()
    inverse = fixed / fixed.sum(-1).amax(-1).clamp(min=1.0).square()[..., None, None]
    for _ in range(num_iterations):
        inverse = 2.0 * inverse - inverse @ fixed @ inverse
    # (A - E)^-1 = A^-1 + A^-1 E A^-1 + A^-1 E A^-1 E A^-1 + ...: E is 0, with two derivatives
    step = inverse @ (fixed - matrix)
    return inverse + step @ (inverse + step @ inverse)
