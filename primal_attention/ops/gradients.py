"""Gradients of gradients for the ops that bring their own backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Vector-Jacobian product by autograd over a plain forward, itself differentiable.

    An op's own backward pass is not differentiable; where a caller asks for that
    (``create_graph=True``), the op falls back on this.
    """
    outputs = forward(*inputs)
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grad_outputs, strict=True)
        if grad is not None and output.requires_grad
    ]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    grads = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
        if pairs and wanted
        else [None] * len(wanted)
    )
    return [next(grads) if x is not None and x.requires_grad else None for x in inputs]
