"""Walk over the tokens in chunks, and compute each chunk again in the backward pass.

A *step* is plain PyTorch: from a state, the rows of a chunk of tokens and tensors that all chunks
share it computes rows of outputs and the next state. A short sequence is one chunk, one call of
the step. A long one keeps its inputs and the state before each chunk: features, kernel values and
scores of one chunk exist at a time. The token axis is the last but one of every row, [..., N, C].
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primal_attention.ops import gradients as autograd
from primal_attention.ops.op import chunk_size
from primal_attention.precision import without_autocast

Tensors = Sequence[Any]  # all but the first row may be None or have axes of size 1
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]


def walk(
    step: Step, state: Tensors, rows: Tensors, shared: Tensors = (), *, reverse: bool = False
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Compute the output rows of all tokens and the state after the last; or first, in reverse."""
    first = rows[0]
    assert first is not None
    with without_autocast(first.device):
        N, size = first.shape[-2], chunk_size(first)
        if size >= N:
            return step(state, rows, shared)
        chunks = [slice(start, min(start + size, N)) for start in range(0, N, size)]
        chunks = chunks[::-1] if reverse else chunks
        tensors = [*state, *rows, *shared]
        if _has_graph(tensors):
            layout = _Layout(step, chunks, len(state), len(rows))
            flat: Sequence[Tensor] = _Walk.apply(layout, *tensors)  # type: ignore[no-untyped-call]
            return flat[: len(flat) - len(state)], flat[len(flat) - len(state) :]
        outputs, states = _run(step, chunks, state, rows, shared)
        return outputs, states[-1]


def _has_graph(tensors: Tensors) -> bool:
    """Return whether reverse-mode autograd records this call, and nothing else differentiates."""
    if not torch.is_grad_enabled() or autograd.is_transformed():
        return False
    return any(each is not None and each.requires_grad for each in tensors)


def _of(rows: Tensors, chunk: slice) -> list[Tensor | None]:
    return [None if each is None else each[..., chunk, :] for each in rows]


def _run(
    step: Step, chunks: list[slice], state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], list[Tensors]]:
    """Compute output rows, and the states before the first chunk and after each."""
    states, results = [state], []
    for chunk in chunks:
        outputs, state = step(state, _of(rows, chunk), shared)
        results.append(outputs)
        states.append(state)
    in_order = results if chunks[0].start == 0 else results[::-1]
    return [torch.cat(each, -2) for each in zip(*in_order, strict=True)], states


class _Layout:
    """Reads the flat arguments of the autograd node."""

    def __init__(self, step: Step, chunks: list[slice], num_state: int, num_rows: int):
        self.step, self.chunks = step, chunks
        self.num_state, self.num_rows = num_state, num_rows

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split into the state, the rows and the shared ones."""
        first, second = self.num_state, self.num_state + self.num_rows
        return list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])

    def of_chunk(self, *tensors: Tensor | None) -> Sequence[Tensor]:
        """Compute the outputs of one chunk, and the state after it."""
        outputs, state = self.step(*self.split(tensors))
        return [*outputs, *state]

    def run(self, *tensors: Tensor | None) -> Sequence[Tensor]:
        """Compute all outputs and the last state, by the graph of the steps."""
        outputs, states = _run(self.step, self.chunks, *self.split(tensors))
        return [*outputs, *states[-1]]


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: _Layout, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        state, rows, shared = layout.split(tensors)
        outputs, states = _run(layout.step, layout.chunks, state, rows, shared)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        between = [each for later in states[1:-1] for each in later]
        ctx.save_for_backward(*tensors, *between)
        return *outputs, *states[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors
        number = len(ctx.needs_input_grad) - 1
        tensors, between = saved[:number], saved[number:]
        with without_autocast(tensors[layout.num_state].device):
            if autograd.are_differentiated():
                return None, *autograd.differentiable_gradients(layout.run, tensors, grads)
            return None, *_by_chunk(layout, tensors, between, grads, ctx.needs_input_grad[1:])


def _by_chunk(
    layout: _Layout, tensors: Tensors, between: Tensors, grads: Tensors, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Compute gradients from the last chunk to the first, recomputing each."""
    state, rows, shared = layout.split(tensors)
    num_outputs = len(grads) - layout.num_state
    d_outputs, d_state = grads[:num_outputs], list(grads[num_outputs:])
    d_rows = [
        torch.empty_like(row) if row is not None and want else None
        for row, want in zip(rows, layout.split(wanted)[1], strict=True)
    ]
    d_shared: list[Tensor | None] = [None] * len(shared)
    size, later = layout.num_state, range(len(layout.chunks) - 1)
    states = [state, *(list(between[n * size : (n + 1) * size]) for n in later)]
    for chunk, before in reversed(list(zip(layout.chunks, states, strict=True))):
        leaves = [
            each if each is None else each.detach().requires_grad_(bool(want))
            for each, want in zip(
                [*before, *_of(rows, chunk), *shared],
                [*[True] * layout.num_state, *wanted[layout.num_state :]],
                strict=True,
            )
        ]
        given = [*_of(d_outputs, chunk), *d_state]
        computed = autograd.differentiable_gradients(layout.of_chunk, leaves, given)
        d_state, of_rows, of_shared = layout.split(computed)
        for whole, part in zip(d_rows, of_rows, strict=True):
            if whole is not None:
                whole[..., chunk, :] = 0.0 if part is None else part
        pairs = zip(d_shared, of_shared, strict=True)
        d_shared = [b if a is None else a if b is None else a + b for a, b in pairs]
    return [*d_state, *d_rows, *d_shared]
