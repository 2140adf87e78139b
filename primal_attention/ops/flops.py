"""Count the products of an op's composition for ``torch.utils.flop_counter``.

Backward: what autograd would multiply for the gradients that are asked for. What an op computes a
second time is not counted; the Gram matrices of a whole layer always are.
"""

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula


class Call(NamedTuple):
    """Call of a composition, of which an op is the backward pass."""

    inputs: Sequence[Any]
    d_outputs: Sequence[Tensor | None]
    wanted: Sequence[bool] = ()  # of the first inputs; all others have gradients


def register_forward(op: Any, composition: Callable[..., Any]) -> None:
    """Count a forward pass."""

    def count(*inputs: Any, out_val: Any = None) -> int:
        with FlopCounterMode(display=False) as counter:
            composition(*map(_without_memory, inputs))
        return int(counter.get_total_flops())

    register_flop_formula(op, get_raw=True)(count)


def register_backward(op: Any, composition: Callable[..., Any], call: Callable[..., Call]) -> None:
    """Count a backward pass; ``call`` turns its inputs into those of the composition."""

    def count(*inputs: Any, out_val: Any = None) -> int:
        counts: list[int] = []
        run = Thread(target=lambda: counts.append(_backward_flops(composition, call(*inputs))))
        run.start()  # this thread is below autograd
        run.join()
        return counts[0]

    register_flop_formula(op, get_raw=True)(count)


def _backward_flops(composition: Callable[..., Any], call: Call) -> int:
    inputs = [_without_memory(each) for each in call.inputs]
    wanted = [*call.wanted, *[True] * (len(inputs) - len(call.wanted))]
    tensors = [
        each.requires_grad_()
        for each, wants in zip(inputs, wanted, strict=True)
        if wants and isinstance(each, Tensor) and each.is_floating_point()
    ]
    outputs = composition(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs = [
        (output, torch.empty_like(output))
        for output, d in zip(outputs, call.d_outputs, strict=False)
        if d is not None and d.numel() and output is not None and output.requires_grad
    ]
    with FlopCounterMode(display=False) as counter:
        if pairs and tensors:
            made, d_made = zip(*pairs, strict=True)
            torch.autograd.grad(made, tensors, d_made, allow_unused=True)
    return int(counter.get_total_flops())


def _without_memory(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
