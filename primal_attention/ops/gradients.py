"""Gradients of gradients for the ops that bring their own backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")  # the batches of torch.autograd.grad


def is_transformed() -> bool:
    """Return whether forward-mode AD or a transform of ``torch.func`` acts on operations."""
    forward_mode = forward_ad._current_level >= 0
    return forward_mode or torch._C._are_functorch_transforms_active()


def are_differentiated() -> bool:
    """Return whether a backward pass must be made of PyTorch's own operations.

    Its result is differentiated itself, or its gradients are batched (``is_grads_batched=True``).
    """
    if torch.compiler.is_compiling():  # a compiled graph has no gradients of gradients
        return False
    batched = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    return torch.is_grad_enabled() or is_transformed() or batched


def differentiable_gradients(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Compute gradients by autograd over a plain forward, differentiable themselves if asked."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: where one input was made from another, the path between is no part of the op.
        own = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
        outputs = forward(*own)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grad_outputs, strict=True)
            if grad is not None and output.requires_grad
        ]
        wanted = [x for x in own if x is not None and x.requires_grad]
        grads = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
            if pairs and wanted
            else [None] * len(wanted)
        )
    return [next(grads) if x is not None and x.requires_grad else None for x in own]
