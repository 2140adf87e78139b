r"""The normalisation of Attention-BN (Nguyen et al. 2023) by the statistics of the keys.

In the regression that attention solves, the keys are the training inputs and a query is a test
point. Normalising the inputs applies the mean $\mu$ and the variance $\sigma^2$ of the keys of one
head of one sequence to both: $z \mapsto (z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$. The
"batch" is the sequence: there are no running statistics over batches.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.attention.base.inputs import zero_padding
from primal_attention.ops.causal import token_counts
from primal_attention.precision import accumulate

# Fewer keys are not rescaled: some feature always varies by almost nothing, and division by that
# turns rounding errors into gradients.
FEWEST_KEYS = 4
_ALL = slice(None)


class KeyMoments(NamedTuple):
    """Number, mean and scatter of sets of keys, in at least float32.

    n is 1 for one set a sequence, or N where each token has a set of its own.
    """

    num_keys: Tensor  # [B, n, 1, 1]
    mean: Tensor  # [B, n, H, C]
    scatter: Tensor  # [B, n, H, C], the sum of squared differences from the mean

    @property
    def variance(self) -> Tensor:
        """The biased variance, a mean over the keys."""
        return self.scatter / self.num_keys.clamp(min=1)


def key_moments(k: Tensor, token_mask: Tensor | None) -> KeyMoments:
    """Compute moments of all real keys of [B, N, H, C] in two passes: mean, then scatter."""
    k = accumulate(k)
    if token_mask is None:
        count = torch.full((k.shape[0], 1), k.shape[1], device=k.device)
    else:
        count = token_mask.sum(1, keepdim=True)
    count = count.to(k.dtype)[:, :, None, None]
    mean = zero_padding(k, token_mask).sum(1, keepdim=True) / count.clamp(min=1)
    scatter = zero_padding((k - mean).square(), token_mask).sum(1, keepdim=True)
    return KeyMoments(count, mean, scatter)


def running_key_moments(k: Tensor, token_mask: Tensor | None) -> KeyMoments:
    r"""Compute moments of the real keys up to each token of [B, N, H, C].

    Each key adds $\frac{n-1}{n} (k_n - \mu_{n-1})^2$ to the scatter (Welford 1962): a sum of
    squares, where the difference $\sum k^2 - n\mu^2$ would lose all its digits once
    $\mu^2 \gg \sigma^2$.
    """
    k = accumulate(k)
    count = token_counts(k, token_mask, None).to(k.dtype)[:, :, None, None]
    divisor = count.clamp(min=1)
    mean = zero_padding(k, token_mask).cumsum(1) / divisor
    previous = torch.cat([torch.zeros_like(mean[:, :1]), mean], dim=1)[:, :-1]
    added = zero_padding((k - previous).square() * (1 - 1 / divisor), token_mask)
    return KeyMoments(count, mean, added.cumsum(1))


class KeyNorm(nn.Module):
    r"""The normalisation $(z - \beta\mu) / \sqrt{\sigma^2 + \epsilon}$ by moments of the keys.

    Args:
        num_heads: Number of heads H.
        beta: Weight $\beta$ of the mean; may be assigned later, to anneal it.
        rescale: Divide by the standard deviation; else only the mean acts.
        eps: The $\epsilon$ beside the variance.
        learnable: Make beta a parameter of each head that starts at the given value.
    """

    beta: float | Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        beta: float = 1.0,
        rescale: bool = True,
        eps: float = 1e-5,
        learnable: bool = False,
    ):
        if not math.isfinite(beta):
            raise ValueError(f"beta must be finite, got {beta}")
        if not 0.0 < eps < math.inf:
            raise ValueError(f"eps must be positive and finite, got {eps}")
        super().__init__()
        self.beta = nn.Parameter(torch.full((num_heads,), beta)) if learnable else beta
        self.rescale, self.eps = rescale, eps

    def forward(
        self, z: Tensor, moments: KeyMoments, heads: slice = _ALL, *, folded: bool = True
    ) -> Tensor:
        r"""Queries $q' = (q - \beta\mu) / (\sigma^2 + \epsilon)$ that go with the keys as they are.

        Softmax attention of the normalised queries and keys is softmax attention of q' and k: the
        terms without the key's index cancel. Without ``folded`` queries or keys are normalised by
        the standard deviation, in at least float32. ``heads`` says which of the layer's these are.
        """
        precision = self._precision(moments)
        if not folded:
            return self._centred(z, moments, heads) * precision.sqrt()
        queries = self._centred(z, moments, heads) * precision
        if z.dtype is torch.float16:  # 1 / eps alone would leave its range
            limit = torch.finfo(torch.float16).max
            queries = queries.clamp(-limit, limit)
        return queries.to(z.dtype)

    def extra_repr(self) -> str:
        """Return the choices, for printing."""
        beta = "learnable" if isinstance(self.beta, Tensor) else self.beta
        return f"beta={beta}, rescale={self.rescale}, eps={self.eps}"

    def _centred(self, z: Tensor, moments: KeyMoments, heads: slice) -> Tensor:
        beta = self.beta
        if isinstance(beta, Tensor):
            beta = accumulate(beta)[heads, None]
        return accumulate(z) - beta * moments.mean

    def _precision(self, moments: KeyMoments) -> Tensor:
        r"""$1 / (\sigma^2 + \epsilon)$, and 1 where there are too few keys to rescale."""
        if not self.rescale:
            return torch.ones_like(moments.num_keys)
        few = moments.num_keys < FEWEST_KEYS
        return torch.where(few, 1.0, 1 / (moments.variance + self.eps))
