"""Walk over the tokens in chunks, and compute each chunk again in the backward pass.

A *step* is plain PyTorch: from a state, the rows of a chunk of tokens and tensors that all chunks
share it computes rows of outputs and the next state. A short sequence is one chunk, one call of
the step. A long one keeps its inputs and the state before each chunk: features, kernel values and
scores of one chunk exist at a time. The token axis is the last but one of every row, [..., N, C].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from primal_attention.ops.op import chunk_size, is_transformed
from primal_attention.precision import without_autocast

Tensors = Sequence[Any]  # all but the first row may be None
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]


def walk(
    step: Step, state: Tensors, rows: Tensors, shared: Tensors = (), *, reverse: bool = False
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Compute the output rows of all tokens and the state after the last; or first, in reverse."""
    first = rows[0]
    with without_autocast(first.device):
        N, size = first.shape[-2], chunk_size(first)
        if size >= N:
            return step(state, rows, shared)
        nothing, results = [None] * -(-N // size), []
        chunks = zip(*(nothing if x is None else x.split(size, -2) for x in rows), strict=True)
        run = step
        if torch.is_grad_enabled() and not is_transformed():
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            run = partial(checkpoint, step, **options, determinism_check="none")
        for chunk in reversed([*chunks]) if reverse else chunks:
            outputs, state = run(state, chunk, shared)
            results.append(outputs)
        in_order = reversed(results) if reverse else results
        return [torch.cat(each, -2) for each in zip(*in_order, strict=True)], state
