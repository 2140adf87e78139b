"""How the ops that begin with the tokens are registered, and stand in the graph of autograd.

Their inputs are tensors with gradients, options, and which Gram matrices are wanted; their outputs
are those of the layer, W_{e|X} and W_{r|X}, and what the backward pass needs. That is given all of
these, the gradients of the outputs, and which gradients are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.op import Op
from primal_attention.precision import exact

OUTPUTS = 5  # those with gradients: of the heads, both Gram matrices, both weights
_GRADIENTS = (
    "Tensor? d_out, Tensor? d_gram_q, Tensor? d_gram_k, Tensor? d_e, Tensor? d_r, "
    "bool of_x, bool of_weight"
)


class Signature(NamedTuple):
    """What an op is given and keeps, in the words of PyTorch's schemas."""

    tensors: str  # with gradients
    options: str
    kept: str  # for the backward pass, beside both weights
    spends: bool = True  # whether the backward pass may be told to write over what is kept

    @property
    def number(self) -> int:
        """Of the tensors with gradients."""
        return _count(self.tensors)

    @property
    def forward(self) -> str:
        """The schema of the forward pass."""
        outputs = _tensors(OUTPUTS + _count(self.kept))
        return f"({self.tensors}, {self.options}, bool gram_q, bool gram_k) -> {outputs}"

    @property
    def backward(self) -> str:
        """The schema of the backward pass."""
        given = f"{self.tensors}, {self.options}, Tensor e, Tensor r, {self.kept}, {_GRADIENTS}"
        return f"({given}{', bool spent' if self.spends else ''}) -> {_tensors(self.number)}"

    def call(self, *inputs: Any) -> Call:
        """The forward pass and the gradients of its outputs, of the inputs of the backward pass."""
        given = self.number + _count(self.options)
        first = given + 2 + _count(self.kept)
        d_outputs, wanted = inputs[first : first + OUTPUTS], inputs[first + OUTPUTS :][:2]
        return Call((*inputs[:given], True, True), d_outputs, wanted)


def register(
    name: str,  # of the op and of its folder
    signature: Signature,
    in_pieces: tuple[Callable[..., Any], Callable[..., Any]],  # forward, backward
    empty: tuple[Callable[..., Any], Callable[..., Any]],  # outputs, gradients
    reference: Callable[..., Sequence[Tensor]],
) -> Op:
    """The op of a forward pass, whose gradients are an op too."""
    forward, backward = map(exact, in_pieces)
    fused = f"primal_attention.ops.{name}.triton"
    backward_op = Op(
        f"{name}_backward",
        backward,
        empty[1],
        fused=f"{fused}.backward",
        schema=signature.backward,
        backward_of=(_all_grams(reference), signature.call),
    )
    computed = partial(_with_spent, backward_op) if signature.spends else backward_op
    return Op(
        f"{name}_forward",
        forward,
        empty[0],
        fused=f"{fused}.forward",
        gradients=partial(gradients, signature.number, computed, reference),
        save=save,
        composition=_all_grams(reference),
        schema=signature.forward,
    )


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
    if are_differentiated():
        grads = differentiable_gradients(lambda *t: reference(*t, *options), tensors, used)
    else:
        wanted = ctx.needs_input_grad[:number]
        computed = backward(*given, *kept, *used, *wanted[:2])
        grads = [d if wants else None for wants, d in zip(wanted, computed, strict=True)]
    return (*grads, *[None] * (len(options) + 2))


def _all_grams(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference with the inputs of the op, the last two of which say what is wanted."""
    return lambda *inputs: reference(*inputs[:-2])


def _with_spent(backward: Callable[..., Any], x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    computed: tuple[Tensor, ...] = backward(x, *given, _is_let_go(x))
    return computed


def _is_let_go(x: Tensor) -> bool:
    """Whether the graph is let go after this backward pass: what it kept may be written over.

    Where x is not a plain tensor the pass may be traced, to be run in other places too.
    """
    return type(x) is Tensor and not torch._C._autograd._get_current_graph_task_keep_graph()


def _count(arguments: str) -> int:
    return arguments.count(",") + 1


def _tensors(number: int) -> str:
    return f"({', '.join(['Tensor'] * number)})"
