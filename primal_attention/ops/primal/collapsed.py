r"""Outputs of heads from matrices $A_e = W_{e|X} C_e$, $A_r = W_{r|X} C_r$, with Gram matrices.

    out = \phi_q(q) A_e + \phi_k(k) A_r + b     G_q = \Phi_q^T \Phi_q     G_k = \Phi_k^T \Phi_k

Letters: B batch, N tokens, H heads, C head dim, P feature dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.op import fused
from primal_attention.ops.primal.eager import both_sides, features, scores_of
from primal_attention.precision import accumulate


class CollapsedInputs(NamedTuple):
    """All that the op is given."""

    q: Tensor  # [B, N, H, P]
    k: Tensor
    a_e: Tensor  # [B, H, P, C], or [H, P, C] for all sequences
    a_r: Tensor
    bias: Tensor | None  # [C]
    token_mask: Tensor | None  # [B, N], True = real token
    map_q: str
    map_k: str


class CollapsedResult(NamedTuple):
    """Outputs, and the Gram matrices over the real tokens."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P]
    gram_k: Tensor


def collapsed_attention(
    q: Tensor,
    k: Tensor,
    a_e: Tensor,
    a_r: Tensor,
    bias: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> CollapsedResult:
    """Outputs [B, N, H, C] of queries and keys [B, N, H, P], zero at padded tokens."""
    given = CollapsedInputs(q, k, a_e, a_r, bias, token_mask, map_q, map_k)
    found = fused("primal", given)
    return collapsed_eager(given) if found is None else CollapsedResult(*found)


def collapsed_eager(given: CollapsedInputs) -> CollapsedResult:
    """The same in plain PyTorch."""
    mask = None if given.token_mask is None else given.token_mask[:, :, None]
    z, maps = both_sides(given.q, given.k), (given.map_q, given.map_k)
    phi = features(z, maps, mask)  # [2, H, B, N, P]
    matrices = [a.transpose(0, 1) if a.ndim == 4 else a for a in (given.a_e, given.a_r)]
    sides = [scores_of(side, accumulate(a)) for side, a in zip(phi, matrices, strict=True)]
    out = sides[0] + sides[1]
    if given.bias is not None:
        out = out + accumulate(given.bias)
    if mask is not None:
        out = torch.where(mask, out, 0.0)
    grams = (phi.mT @ phi).transpose(1, 2)
    return CollapsedResult(out.permute(1, 2, 0, 3).to(given.q.dtype), grams[0], grams[1])
