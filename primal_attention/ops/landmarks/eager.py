r"""Weights sampled from the landmarks, $W_{e|X} = X'^\top w_e$ and $W_{r|X} = X'^\top w_r$.

Letters: B batch, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.landmarks.choice import Landmarks
from primal_attention.precision import accumulate, exact


def sampled_weights(landmarks: Landmarks, parameters: Tensor) -> Tensor:
    """Both weights [2, H, B, P, S] of parameters w_e, w_r side by side, [H, M, 2 S]."""
    return _product(landmarks.rows(), parameters)


@exact
def _product(rows: Tensor, parameters: Tensor) -> Tensor:
    B, M, D = rows.shape
    H = parameters.shape[0]
    by_head = accumulate(rows).view(B, M, H, D // H).permute(2, 0, 3, 1)  # [H, B, P, M]
    weights = by_head.reshape(H, B * (D // H), M) @ parameters.to(by_head.dtype)  # [H, B P, 2 S]
    S = parameters.shape[-1] // 2
    return weights.view(H, B, D // H, 2, S).permute(3, 0, 1, 2, 4)
