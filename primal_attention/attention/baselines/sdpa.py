"""PyTorch's softmax attention, in a form that can be differentiated in every mode."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.ops.gradients import is_transformed


def dot_product_attention(
    q: Tensor,  # [B, H, N, C]
    k: Tensor,  # [B, H, T, C]
    v: Tensor,
    mask: Tensor | None = None,  # broadcasts to [B, H, N, T], True where a key is seen
    *,
    causal: bool = False,
) -> Tensor:
    """Call ``scaled_dot_product_attention``.

    Forward-mode AD and ``torch.func`` get its products of matrices: the fused kernels have no
    derivative in forward mode, and their backward passes have none at all.
    """
    if is_transformed():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
