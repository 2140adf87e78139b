"""A layer from its paper, one sequence and one head at a time; padding is taken out first."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

OneHead = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def by_sequence(
    layer: nn.Module,
    one_head: OneHead,
    x: Tensor,
    mask: Tensor | None = None,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """The outputs [B, N, D] of a layer whose heads are `one_head(q [n, C], k, v, head)`."""
    rows = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        tokens = source = x[b][real]
        if context is not None:
            source = context[b] if context_mask is None else context[b][context_mask[b]]
        row = torch.zeros_like(x[b])
        if len(tokens):
            row = row.index_put(
                (real.nonzero()[:, 0],), one_sequence(layer, one_head, tokens, source)
            )
        rows.append(row)
    return torch.stack(rows)


def one_sequence(layer: nn.Module, one_head: OneHead, x: Tensor, source: Tensor) -> Tensor:
    q, v = layer.q_proj(x), layer.v_proj(source)
    k = layer.k_proj(source) if hasattr(layer, "k_proj") else q
    heads = zip(*(z.chunk(layer.num_heads, dim=-1) for z in (q, k, v)), strict=True)
    outputs = [one_head(*head, h) for h, head in enumerate(heads)]
    return layer.out_proj(torch.cat(outputs, dim=-1))


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes())
        return output


def largest_tensor(layer: nn.Module, num_tokens: int) -> int:
    """Bytes of the largest tensor in a training pass over that many tokens."""
    x = torch.randn(1, num_tokens, layer.dim, requires_grad=True)
    with LargestTensor() as largest:
        layer(x).sum().backward()
    return largest.elements
