"""Projection weights W_{e|X} and W_{r|X}: which there are, and those that depend on the data.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from einops import rearrange
from torch import Tensor

from primal_attention.attention.features import Side
from primal_attention.attention.options import check_choice
from primal_attention.ops import sampled
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.moment import moment
from primal_attention.precision import accumulate


def check_weights(weights: str, *, causal: bool, gain: float, landmark_jitter: float) -> None:
    """Raise unless a layer can have such weights."""
    check_choice("weights", weights, ("static", "sampled", "dual"))
    if not 0 <= landmark_jitter < math.inf:
        raise ValueError(f"landmark_jitter must be finite and not negative, got {landmark_jitter}")
    if not 0 < gain < math.inf or (gain != 1 and weights == "dual"):
        raise ValueError(
            f"gain must be positive and finite, and 1 with weights='dual', which have no w_e "
            f"and w_r; got {gain} and weights={weights!r}"
        )
    if causal and weights == "sampled":
        raise ValueError(
            "causal=True does not go with weights='sampled': landmarks show every token the "
            "future; use weights='static' or weights='dual'"
        )


class ProjectionWeights(NamedTuple):
    """The weights of one forward pass."""

    e: Tensor  # W_{e|X}: [B, H, P, S] or [H, P, S]
    r: Tensor  # W_{r|X}
    landmarks: Landmarks | None = None  # F_X = X'; None where F_X is the identity
    a_e: Tensor | None = None  # W_{e|X} C_e [B, H, P, C], where it has come along
    a_r: Tensor | None = None

    @property
    def x_sampled(self) -> Tensor | None:
        """F_X [B, H, M, P]; None where it is the identity."""
        if self.landmarks is None:
            return None
        return accumulate(
            rearrange(self.landmarks.rows(), "b m (h p) -> b h m p", h=self.e.shape[1])
        )


def sampled_weights(
    landmarks: Landmarks, w_e: Tensor, w_r: Tensor, c_e: Tensor | None, c_r: Tensor | None
) -> ProjectionWeights:
    r"""$W_{e|X} = X'^\top w_e$ from the landmarks, sliced by head, and $A_e = W_{e|X} C_e$."""
    x, index, scale = landmarks
    e, r, a_e, a_r = sampled.sampled_weights(x, index, w_e, w_r, c_e, c_r, scale)
    return ProjectionWeights(e, r, landmarks, a_e, a_r)


def dual_moment(side: Side, dual_variables: Tensor, token_mask: Tensor | None) -> Tensor:
    r"""The sums of eq. (14), $\Phi^\top H$ over the real tokens, [B, H, P, S]."""
    return moment(side.z, dual_variables, token_mask=token_mask, feature_map=side.feature_map)


def token_mean(total: Tensor, num_tokens: Tensor) -> Tensor:
    """A sum [B, H, P, S] over n tokens, divided by n; zero where there are none."""
    return total / num_tokens.clamp(min=1)[:, None, None, None]
