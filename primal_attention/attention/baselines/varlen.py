"""Softmax attention over the real tokens alone, all sequences of a batch one after the other.

Flash attention takes no masks, but sequences of different lengths that stand without padding
between them. So the real tokens are moved together, wherever padding stood, and the outputs back.
Nothing waits for the device, and no shape depends on the masks: what is left over at the end of the
rows belongs to no sequence, and nobody reads it.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import together

_WIDEST = 256  # columns of a head


def takes(q: Tensor) -> bool:
    """Whether flash attention takes queries of this kind, and may."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST and _flash_runs()


def _flash_runs() -> bool:
    """Whether the device in use has it, and it is on; compiled code asks once."""
    on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return on and torch.cuda.get_device_capability() >= (8, 0)


# As torch.compiler.assume_constant_result has it, which would import the compiler.
_flash_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def varlen_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C]
    v: Tensor,  # [B, T, H, C]
    mask: Tensor | None,  # [B, N], True = real token
    source_mask: Tensor,  # [B, T]
) -> Tensor:
    """Softmax attention [B, N, H, C]; zero at padding and where a query has no key to see."""
    from torch.nn.attention import varlen  # imports the compiler

    keys, key_bounds = together(source_mask)
    if mask is None:
        mask = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    queries, bounds = (keys, key_bounds) if mask is source_mask else together(mask)
    rows = queries.pack(q), keys.pack(k), keys.pack(v)
    out: Tensor = varlen.varlen_attn(*rows, bounds, key_bounds, q.shape[1], k.shape[1])  # type: ignore[assignment]
    return queries.unpack(out)
