"""Inputs of the KSVD objective; Gram matrices that are not symmetric, sequences without tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .formulas import randn

B, H, P, S = 3, 2, 5, 7
CASES = ["batched, given", "batched, own", "shared, given", "shared, own"]  # weights, trace


def count_tensors(batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Numbers of queries and keys; no keys in the second sequence, no queries in every fourth."""
    b = torch.arange(batch)
    num_queries, num_keys = 5 + 3 * b, 4 + 7 * b
    num_keys[1:2] = 0
    num_queries[3::4] = 0
    return [num_queries.to(dtype), num_keys.to(dtype)]


def make_inputs(
    case: str, *, batch: int = B, heads: int = H, width: int = P, directions: int = S
) -> list[Tensor | None]:
    """All but the numbers of tokens, in float64."""
    grams = [_gram(batch, heads, width, seed=10 * i) for i in range(2)]
    leading = (batch, heads) if "batched" in case else (heads,)
    weights = [randn(*leading, width, directions, seed=2 + i) for i in range(2)]
    lambda_diag = randn(heads, directions, seed=4).abs()
    trace = None if "own" in case else randn(heads, seed=5)
    return [*grams, *weights, lambda_diag, trace]


def _gram(batch: int, heads: int, width: int, *, seed: int) -> Tensor:
    phi = randn(batch, heads, 2 * width, width, seed=seed)
    return phi.mT @ phi + 0.3 * randn(batch, heads, width, width, seed=seed + 1)
