"""Count the products of an op's eager form for ``torch.utils.flop_counter``.

Backward: what autograd would multiply for the gradients that are asked for. What an op computes a
second time is not counted; the Gram matrices of a whole layer always are.
"""

from collections.abc import Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula


def register(op: Any) -> None:
    """Count both passes of a fused op."""
    packets = torch.ops.primal_attention

    @register_flop_formula(getattr(packets, f"{op.name}_forward"), get_raw=True)
    def forward(*flat: Any, out_val: Any = None) -> int:
        with FlopCounterMode(display=False) as counter:
            op.eager(op.inputs(*map(_without_memory, flat)))
        return int(counter.get_total_flops())

    @register_flop_formula(getattr(packets, f"{op.name}_backward"), get_raw=True)
    def backward(*flat: Any, out_val: Any = None) -> int:
        *given, _, grads, flags = flat
        counts: list[int] = []
        run = Thread(target=lambda: counts.append(_backward_flops(op, given, grads, flags)))
        run.start()  # this thread is below autograd
        run.join()
        return counts[0]


def _backward_flops(
    op: Any, given: Sequence[Any], grads: Sequence[Tensor | None], flags: Sequence[bool]
) -> int:
    inputs = op.inputs(*map(_without_memory, given))
    pairs = zip(op.differentiable, flags, strict=True)
    wanted = [getattr(inputs, name) for name, wants in pairs if wants]
    tensors = [each.requires_grad_() for each in wanted if each is not None]
    asked = [
        (output, torch.empty_like(output))
        for output, d in zip(op.eager(inputs), grads, strict=False)
        if d is not None and d.numel() and output is not None and output.requires_grad
    ]
    with FlopCounterMode(display=False) as counter:
        if asked and tensors:
            outputs, d_outputs = zip(*asked, strict=True)
            torch.autograd.grad(outputs, tensors, d_outputs, allow_unused=True)
    return int(counter.get_total_flops())


def _without_memory(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
