"""Sampled weights spelled out: the landmarks X' are gathered, the rest are products of matrices.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

from einops import einsum, rearrange
from torch import Tensor

from primal_attention.ops.landmarks import Landmarks
from primal_attention.precision import accumulate, accumulation_dtype, exact


class SampledWeights(NamedTuple):
    """The weights given the data, and their products with the output map."""

    e: Tensor  # W_{e|X} [B, H, P, S]
    r: Tensor  # W_{r|X}
    a_e: Tensor | None  # W_{e|X} C_e [B, H, P, C]; None where e is not output
    a_r: Tensor | None


@exact
def sampled_weights(
    x: Tensor,  # [B, N, D] with D = H P
    index: Tensor,  # [B, M], the positions of the landmarks; -1 for a row of zeros
    w_e: Tensor,  # [H, M, S]
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    scale: float = 1.0,
) -> SampledWeights:
    r"""$W_{e|X} = X'^\top w_e$ with X' sliced by head and times the scale; $A_e = W_{e|X} C_e$."""
    dtype = accumulation_dtype(x.dtype)
    rows = accumulate(Landmarks(x, index).rows()) * scale  # [B, M, D]
    x_sampled = rearrange(rows, "b m (h p) -> b h m p", h=w_e.shape[0])
    e, r = (einsum(x_sampled, w.to(dtype), "b h m p, h m s -> b h p s") for w in (w_e, w_r))
    a_e, a_r = (None if c is None else w @ c.to(dtype) for w, c in ((e, c_e), (r, c_r)))
    return SampledWeights(e, r, a_e, a_r)
