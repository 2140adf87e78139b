"""Calls of a module: forward alone, and forward with backward."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

SEED = 20230923


class PassResult(NamedTuple):
    """The output of one forward pass and the gradients of one backward pass."""

    output: Tensor  # [B, N, D]
    d_input: Tensor  # [B, N, D]
    d_context: Tensor | None  # [B, M, D]
    d_parameters: dict[str, Tensor]


def forward(layer: nn.Module, x: Tensor, **arguments: Tensor) -> Tensor:
    """Call the module from a fixed state of the random number generator.

    With the same random numbers in every call, a module that draws some in eval mode breaks the
    clause on determinism and not every comparison.
    """
    torch.manual_seed(SEED)
    output = layer(x, **arguments)
    if not isinstance(output, Tensor):
        raise TypeError(f"forward must return a Tensor, it returned {type(output).__name__}")
    return output


def forward_backward(
    layer: nn.Module,
    x: Tensor,
    cotangent: Tensor,
    *,
    within: AbstractContextManager[object] | None = None,
    **arguments: Tensor | None,
) -> PassResult:
    """Forward, then backward from `cotangent`; `within` surrounds the forward pass only.

    Arguments that are None are left out of the call. An input or a parameter that the output does
    not depend on has gradient 0.
    """
    x = x.detach().clone().requires_grad_()
    given = {name: value for name, value in arguments.items() if value is not None}
    context = given.get("context")
    if context is not None:
        given["context"] = context = context.detach().clone().requires_grad_()
    with within or nullcontext():
        output = forward(layer, x, **given)
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    inputs = [x, *parameters.values()] + ([] if context is None else [context])
    grads = torch.autograd.grad(
        output, inputs, cotangent.to(output), allow_unused=True, materialize_grads=True
    )
    d_parameters = dict(zip(parameters, grads[1:], strict=False))
    d_context = None if context is None else grads[-1]
    return PassResult(output.detach(), grads[0], d_context, d_parameters)
