"""The whole layer as one node, from the tokens to the outputs of its heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.landmarks import Landmarks

LARGE = 1 << 22  # elements of the tokens from which on the fused node is quicker; to be measured


class LayerInputs(NamedTuple):
    """All that the node is given."""

    x: Tensor  # [B, N, D], in the dtype of the weight
    weight: Tensor  # [R, D]: rows of the queries, the keys and, for dual weights, H_e and H_r
    shift: Tensor | None  # [R]
    w_e: Tensor | None  # [H, M, S] with landmarks, [H, P, S] without; None for dual weights
    w_r: Tensor | None
    c_e: Tensor | None  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None
    bias: Tensor | None  # [C]
    landmarks: Landmarks | None
    num_heads: int
    causal: bool
    token_mask: Tensor | None  # [B, N], True at real tokens
    maps: tuple[str, str]
    grams: bool


class LayerResult(NamedTuple):
    """Outputs of the heads, and what the objectives need."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P]; empty unless wanted
    gram_k: Tensor
    w_e_given_x: Tensor  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor


def takes(x: Tensor) -> bool:
    """Whether a fused node may be quicker for these tokens [B, N, D]; by their number alone."""
    return x.is_cuda and x.numel() >= LARGE and not torch.compiler.is_exporting()


def fused_layer(inputs: LayerInputs) -> LayerResult | None:
    """The outputs; None where no backend takes the inputs."""
    from primal_attention.ops.projected import projected_attention
    from primal_attention.ops.projected_dual import projected_dual_attention
    from primal_attention.ops.projected_dual_causal import projected_dual_causal_attention

    if not takes(inputs.x):
        return None
    x, weight, shift, w_e, w_r, c_e, c_r, bias, landmarks, num_heads, causal, mask, maps, grams = (
        inputs
    )
    options = {
        "token_mask": mask,
        "map_q": maps[0],
        "map_k": maps[1],
        "gram_q": grams,
        "gram_k": grams,
    }
    if w_e is None or w_r is None:
        attention = projected_dual_causal_attention if causal else projected_dual_attention
        result = attention(x, weight, shift, c_e, c_r, bias, num_heads=num_heads, **options)
    else:
        result = projected_attention(
            x, weight, shift, w_e, w_r, c_e, c_r, bias, landmarks, causal=causal, **options
        )
    return LayerResult(*result)
