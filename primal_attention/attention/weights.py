"""Projection weights W_{e|X} and W_{r|X} that depend on the data.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

from einops import einsum, rearrange
from torch import Tensor

from primal_attention.attention.features import Side
from primal_attention.ops.moment import moment
from primal_attention.precision import accumulate, exact


class ProjectionWeights(NamedTuple):
    """The weights of one forward pass."""

    e: Tensor  # W_{e|X}: [B, H, P, S] or [H, P, S]
    r: Tensor  # W_{r|X}
    x_sampled: Tensor | None = None  # [B, H, M, P] = F_X; None where F_X is the identity


@exact
def sampled_weights(x_sampled: Tensor, w_e: Tensor, w_r: Tensor) -> ProjectionWeights:
    r"""$W_{e|X} = X'^\top w_e$ from the landmarks X' [B, M, D], sliced by head, unscaled."""
    x_sampled = accumulate(rearrange(x_sampled, "b m (h p) -> b h m p", h=w_e.shape[0]))
    e, r = (
        einsum(x_sampled, w.to(x_sampled.dtype), "b h m p, h m s -> b h p s") for w in (w_e, w_r)
    )
    return ProjectionWeights(e, r, x_sampled)


def dual_moment(side: Side, dual_variables: Tensor, token_mask: Tensor | None) -> Tensor:
    r"""The sums of eq. (14), $\Phi^\top H$ over the real tokens, [B, H, P, S]."""
    return moment(side.z, dual_variables, token_mask=token_mask, feature_map=side.feature_map)


def token_mean(total: Tensor, num_tokens: Tensor) -> Tensor:
    """A sum [B, H, P, S] over n tokens, divided by n; zero where there are none."""
    return total / num_tokens.clamp(min=1)[:, None, None, None]
