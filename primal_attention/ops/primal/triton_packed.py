"""The fused ops of Primal-Attention on queries and keys that lie side by side.

Letters: B batch, N tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.primal import triton as apart


def takes(qk: Tensor, a_e: Tensor | None, a_r: Tensor | None, *options: Any) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    q, k = qk.unbind(2)
    return apart.takes(q, k, a_e, a_r)


def forward(qk: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and Gram matrices; empty where they are not wanted."""
    q, k = qk.unbind(2)
    return apart.forward(q, k, *rest)


def backward(
    qk: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qk, a_e, a_r and bias; empty where there is no such input."""
    d_qk = torch.empty_like(qk)
    grads = [None if x is None else torch.empty_like(x) for x in (a_e, a_r, bias)]
    (q, k), (dq, dk) = qk.unbind(2), d_qk.unbind(2)
    maps, d_outputs = (token_mask, map_q, map_k), (d_out, d_gram_q, d_gram_k)
    apart.write_gradients(q, k, a_e, a_r, *maps, *d_outputs, [dq, dk, *grads])
    da_e, da_r, d_bias = (qk.new_empty(0) if grad is None else grad for grad in grads)
    return d_qk, da_e, da_r, d_bias
