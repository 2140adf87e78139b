"""An op: what PyTorch is told of it, and the short way to its arithmetic.

``torch.library`` gives an op its place in the dispatcher, which tracing, compilation, export and
tensor subclasses need. That place costs a call tens of microseconds, as long as a fused op runs on
a small batch. A plain call has no use for it and goes to the same functions directly.

Forward-mode AD and the transforms of ``torch.func`` differentiate PyTorch's operations and would
take an op for a constant. Under them a call runs the op's composition of such operations instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.ops import flops
from primal_attention.ops.gpu import fused_or_in_pieces
from primal_attention.ops.gradients import is_forward_mode, is_transformed

_PLAIN = frozenset((Tensor, nn.Parameter))


class Op:
    """An op ``primal_attention::name`` whose first input is a tensor."""

    def __init__(
        self,
        name: str,
        in_pieces: Callable[..., Any],
        empty: Callable[..., Any],  # outputs of the right kind, unwritten
        *,
        fused: str | None = None,  # the function that takes the place of in_pieces on a GPU
        gradients: Callable[..., Any] | None = None,  # (ctx, *d_outputs)
        save: Callable[..., None] | None = None,  # (ctx, inputs, output), for the gradients
        schema: str | None = None,  # None: by the annotations of in_pieces
        composition: Callable[..., Any] | None = None,  # of operations that have derivatives
        backward_of: tuple[Callable[..., Any], Callable[..., flops.Call]] | None = None,
    ):
        self.name, self.composition = name, composition
        self.in_pieces = in_pieces
        self.on_gpu = in_pieces if fused is None else fused_or_in_pieces(in_pieces, fused)
        self.registered: Any = torch.library.custom_op(
            f"primal_attention::{name}", in_pieces, mutates_args=(), schema=schema
        )
        self.registered.register_fake(empty)
        packet = getattr(torch.ops.primal_attention, name)
        if composition is not None:
            flops.register_forward(packet, composition)
        if backward_of is not None:  # a composition, and its call by the inputs of this op
            flops.register_backward(packet, *backward_of)
        if fused is not None:
            self.registered.register_kernel("cuda", self.on_gpu)
        self.apply: Callable[..., Any] | None = None  # with a place in the graph of autograd
        if gradients is not None and save is not None:
            self.registered.register_autograd(gradients, setup_context=save)
            node = self._make_node(name, gradients, save)
            # As torch.autograd.Function applies it once it has found no functorch transforms.
            self.apply = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def __call__(self, *inputs: Any) -> Any:
        """The outputs, in the graph of autograd where an input is."""
        if self.composition is not None and is_transformed():
            return self.composition(*inputs)
        if is_forward_mode():
            raise NotImplementedError(
                f"primal_attention::{self.name} has no derivative in forward mode; "
                f"take it by reverse mode (torch.autograd.grad)"
            )
        if not _is_plain_call(inputs[0]):
            return self.registered(*inputs)
        has_place = False
        for each in inputs:
            if isinstance(each, Tensor):
                if type(each) not in _PLAIN or each.is_neg():  # its memory holds something else
                    return self.registered(*inputs)
                has_place = has_place or each.requires_grad
        if not has_place or not torch.is_grad_enabled():
            return self.compute(*inputs)
        return (self.apply or self.registered)(*inputs)

    def compute(self, *inputs: Any) -> Any:
        """The outputs, as the dispatcher has them computed: out of the sight of autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            return (self.on_gpu if inputs[0].is_cuda else self.in_pieces)(*inputs)

    def _make_node(
        self, name: str, gradients: Callable[..., Any], save: Callable[..., None]
    ) -> type[torch.autograd.Function]:
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self.compute(*inputs)
            save(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        return type(name, (torch.autograd.Function,), methods)


def _is_plain_call(first: Tensor) -> bool:
    """Whether nothing stands between a call and its arithmetic: no tracing, modes or transforms."""
    return (first.is_cuda or first.is_cpu) and not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
    )
