"""How the ops that begin with the tokens stand in the graph of autograd.

Their inputs are tensors with gradients, options, and which Gram matrices are wanted; their outputs
are those of the layer, W_{e|X} and W_{r|X}, and what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.gradients import differentiable_gradients

OUTPUTS = 5  # those with gradients: of the heads, both Gram matrices, both weights


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep all inputs but the last two, both weights, and what was made for the backward pass."""
    *given, _, _ = inputs
    ctx.options = [None if isinstance(each, Tensor) else each for each in given]
    tensors = (each if isinstance(each, Tensor) else None for each in given)
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[OUTPUTS - 2 :])


def gradients(
    number: int,  # of the tensors with gradients, which come first
    backward: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    ctx: Any,
    *d_outputs: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs: by the backward pass, or differentiable ones by the reference."""
    saved, count = ctx.saved_tensors, len(ctx.options)
    pairs = zip(saved[:count], ctx.options, strict=True)
    given = [option if tensor is None else tensor for tensor, option in pairs]
    tensors, options, kept = given[:number], given[number:], saved[count:]
    used = [None if d is None or not d.numel() else d for d in d_outputs[:OUTPUTS]]
    grads: list[Tensor | None]
    if torch.is_grad_enabled():
        grads = differentiable_gradients(lambda *t: reference(*t, *options), tensors, used)
    else:
        wanted = ctx.needs_input_grad[:number]
        computed = backward(*given, *kept, *used, *wanted[:2])
        grads = [d if wants else None for wants, d in zip(wanted, computed, strict=True)]
    return (*grads, *[None] * (len(options) + 2))


def is_let_go(x: Tensor) -> bool:
    """Whether the graph is let go after this backward pass: what it kept may be written over.

    Where x is not a plain tensor the pass may be traced, to be run in other places too.
    """
    return type(x) is Tensor and not torch._C._autograd._get_current_graph_task_keep_graph()
