"""The op with fused passes; the products with the projection's matrix are the library's.

Letters: H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops.dual_causal import triton as dual_causal
from primal_attention.ops.dual_causal.sizes import takes_sizes
from primal_attention.ops.projected_dual.reference import directions_of
from primal_attention.ops.projected_dual_causal.passes import (
    CausalPasses,
    compose_backward,
    compose_forward,
)
from primal_attention.ops.running_mean.triton import counts_if_masked
from primal_attention.precision import exact

FUSED = CausalPasses(counts_if_masked, dual_causal.forward, dual_causal.write_gradients)


def takes(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    num_heads: int,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    *rest: Any,
) -> bool:
    """Whether the fused form is made for these dtypes, sizes and maps."""
    S, V = directions_of(c_e, c_r), next(c.shape[1] for c in (c_e, c_r) if c is not None)
    P = weight.shape[0] // (2 * num_heads) - S
    return takes_sizes(weight.dtype, P, S, V, map_q, map_k) and x.numel() > 0


@exact
def forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, and what the backward pass needs of their making."""
    return compose_forward(FUSED, x, *rest)


@exact
def backward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first six inputs; empty where they are not given or not wanted."""
    return compose_backward(FUSED, x, *rest)
