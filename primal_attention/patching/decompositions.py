"""The ops of this library in plain arithmetic, for graphs that run where the library is not.

An op walks over the tokens in pieces, or is one fused kernel; neither can be written into a graph
that holds for any length. Here each stands as its formulas, which do not look at the length. Those
of causal sums have the N x N matrix of kernel values.

Letters: B batch, N tokens, M landmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primal_attention.attention import ATTENTIONS  # noqa: F401  (registers the ops)
from primal_attention.attention.order import take, token_order
from primal_attention.attention.reformer import nearest_directions
from primal_attention.ops.collapse.composed import collapse_composed
from primal_attention.ops.dual_causal import reference as dual_causal
from primal_attention.ops.landmarks.choice import landmark_order
from primal_attention.ops.moment import reference as moment
from primal_attention.ops.primal.chunked import in_one_piece
from primal_attention.ops.running_mean import reference as running_mean
from primal_attention.ops.sampled import reference as sampled
from primal_attention.ops.scan import reference as scan

Decompositions = dict[torch._ops.OperatorBase, Callable[..., Any]]


def decompositions() -> Decompositions:
    """What to pass to ``ExportedProgram.run_decompositions``, for models in evaluation mode."""
    ops = torch.ops.primal_attention
    return {
        ops.collapse_forward.default: collapse_composed,
        ops.dual_causal_forward.default: _dual_causal,
        ops.landmark_index.default: _landmark_index,
        ops.moment_forward.default: _moment,
        ops.primal_forward.default: in_one_piece,
        ops.reformer_buckets.default: nearest_directions,
        ops.running_mean_forward.default: _running_mean,
        ops.sampled_forward.default: _sampled,
        ops.scan_forward.default: _scan,
    }


def _dual_causal(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, counts, token_mask, map_q, map_k, grams, _ = inputs
    result = dual_causal.dual_causal_attention(
        *tensors, counts=counts, token_mask=token_mask, map_q=map_q, map_k=map_k, grams=grams
    )
    return *result, _nothing(result.q_side)


def _landmark_index(
    x: Tensor,
    token_mask: Tensor | None,
    moves: None,  # the jitter and dropout of training
    drops: None,
    num_landmarks: int,
    *shares: float,
) -> Tensor:
    """With the inverse of a permutation in the place of ``searchsorted``, which ONNX has not."""
    order = token_order(x, token_mask)
    token_at = order.pack(torch.arange(order.length, device=x.device).expand(x.shape[0], -1))
    index = take(token_at, landmark_order(order.num_real, num_landmarks))
    return torch.where((order.num_real > 0)[:, None], index, -1)


def _moment(z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str) -> Tensor:
    return moment.moment(z, values, token_mask=token_mask, feature_map=feature_map)


def _running_mean(
    z: Tensor, before: Tensor | None, counts: Tensor, token_mask: Tensor | None
) -> tuple[Tensor, ...]:
    return tuple(running_mean.running_mean(z, counts, token_mask=token_mask, before=before))


def _sampled(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    result = sampled.sampled_weights(x, *rest)
    return tuple(_nothing(x) if each is None else each for each in result)


def _scan(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, token_mask, map_q, map_k = inputs
    return tuple(scan.scan(*tensors, token_mask=token_mask, map_q=map_q, map_k=map_k))


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)
