"""Collectives that autograd differentiates and ``torch.compile`` records, and a count of them.

The losses of all processes are added up: the gradient of a sum over processes is the sum of the
gradients that they have of it. Double backward passes work; forward mode does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OPS: Any = torch.ops._c10d_functional


class Group(NamedTuple):
    """Processes that share sequences; by name, so that modules can be copied and pickled.

    Without a name nothing is sent, and only shapes and counts mean something.
    """

    name: str
    rank: int
    size: int


class Message(NamedTuple):
    """One collective, as each process took part in it."""

    kind: str
    size: int  # processes
    bytes: int  # of the tensor that each process gave

    @property
    def sent(self) -> float:
        """Bytes that each process sends where the processes stand in a ring."""
        share = (self.size - 1) / self.size
        factors = {"all_reduce": 2 * share, "all_gather": self.size - 1, "broadcast": 1.0}
        return self.bytes * factors.get(self.kind, share)


_COUNTS: list[list[Message]] = []


@contextmanager
def count_messages() -> Iterator[list[Message]]:
    """Collect the messages of this process; those of compiled graphs are not seen."""
    messages: list[Message] = []
    _COUNTS.append(messages)
    try:
        yield messages
    finally:
        _COUNTS.remove(messages)


def _call(kind: str, tensor: Tensor, group: Group, *options: Any) -> Tensor:
    if not torch.compiler.is_compiling():
        for messages in _COUNTS:
            messages.append(Message(kind, group.size, tensor.numel() * tensor.element_size()))
    if not group.name:
        return _unsent(kind, tensor, group)
    op = getattr(_OPS, _NAMES.get(kind, kind))
    result: Tensor = _OPS.wait_tensor(op(tensor.contiguous(), *options, group.name))
    return result


def _unsent(kind: str, tensor: Tensor, group: Group) -> Tensor:
    if kind == "all_gather":
        return tensor.expand(group.size, *tensor.shape[1:])
    return tensor[0] if kind == "reduce_scatter" else tensor.clone()


_NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _call("all_reduce", tensor, group, "sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return total(gradients[0], ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        rows = _call("all_gather", tensor.reshape(1, -1), group, group.size)
        return rows.view(group.size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Scattered.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        flat = rows.reshape(group.size, -1)
        return _call("reduce_scatter", flat, group, "sum", group.size).view(rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.group), None


class _MeanGradient(torch.autograd.Function):
    """A tensor that all processes have, whose gradient is the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return total(gradients[0], ctx.group) / ctx.group.size, None


def total(tensor: Tensor, group: Group) -> Tensor:
    """Add up the tensors of all processes."""
    summed: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """Collect the tensors of all processes, [size, ...]."""
    rows: Tensor = _Gathered.apply(tensor, group)  # type: ignore[no-untyped-call]
    return rows


def from_first(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor of the first process, without a gradient."""
    return _call("broadcast", tensor.detach(), group, 0)


def with_mean_gradient(tensor: Tensor, group: Group) -> Tensor:
    """Return a tensor that all processes have; its gradient becomes the mean of theirs."""
    shared: Tensor = _MeanGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return shared
