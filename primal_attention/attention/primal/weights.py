"""Projection weights W_{e|X} and W_{r|X}: which there are, and those that depend on the data.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

import math

from primal_attention.attention.base.validation import check_choice


def check_weights(
    weights: str, decay: str | None, *, causal: bool, gain: float, landmark_jitter: float
) -> None:
    """Raise unless a layer can have such weights."""
    check_choice("weights", weights, ("static", "sampled", "dual", "auto"))
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
            "future; use weights='auto', weights='static' or weights='dual'"
        )
    if decay is not None and weights != "dual":
        raise ValueError(
            f"decay={decay!r} needs weights='dual': it is a weight on pairs of tokens, which "
            f"weights={weights!r} do not have"
        )
