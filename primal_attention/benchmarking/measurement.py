"""One measurement: a subject, one pass, all clocks; what goes wrong is told, never raised."""

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from primal_attention.benchmarking.clocks import (
    HostSynchronisationError,
    culprit,
    graph_ms,
    peak_mib,
    wall_ms,
)
from primal_attention.benchmarking.layers import Outputs
from primal_attention.benchmarking.registry import Entry, LayerSizes, TimedModule
from primal_attention.objectives import record_ksvd

_ETA = 0.1


class Measurement(NamedTuple):
    """Times and memory; None where there is no number, and then the note says why."""

    gpu_ms: float | None = None
    wall_ms: float | None = None
    peak_mib: float | None = None
    moved: int | None = None  # bytes, at least
    note: str = ""


def measure(
    entry: Entry,
    sizes: LayerSizes,
    kind: str,
    device: torch.device,
    *,
    compiled: bool = False,
    replayed: bool = True,
) -> Measurement:
    """Time one pass of an entry: ``fwd``, ``fwd+bwd``, ``bwd``, ``step`` or ``decode``.

    The last two are of one token after the others, by ``step`` or by ``decoder``. There is no time
    of the GPU alone where it is not replayed as a graph.
    """
    _let_go(device)
    try:
        subject = entry.subject(sizes, device)
        if kind == "bwd":
            return _less(
                *(_measured(subject, each, compiled, replayed) for each in ("fwd+bwd", "fwd"))
            )
        return _measured(subject, kind, compiled, replayed)
    except Exception as error:
        return Measurement(note=reason(error))


def reason(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, HostSynchronisationError | ModuleNotFoundError):
        return str(error)
    said = (str(error).strip() or "nothing said").splitlines()[0]
    return f"{type(error).__name__} in {culprit(error)}: {said}"[:300]


def _measured(subject: TimedModule, kind: str, compiled: bool, replayed: bool) -> Measurement:
    device = subject.x.device
    subject.module.train(kind == "fwd+bwd")
    call: Call = _compiled(subject) if compiled else subject.module
    run, moved = (
        _decoding(subject, kind)
        if kind in ("step", "decode")
        else _forward(subject, call)
        if kind == "fwd"
        else _both(subject, call)
    )
    replayed = replayed and kind != "decode"  # which replays a graph by itself
    run()
    wall = wall_ms(run, device)
    with record_ksvd(subject.module):  # frees what the last step kept
        pass
    peak, gpu, note = peak_mib(run, device), None, ""
    if replayed and device.type == "cuda":
        try:
            gpu = graph_ms(run, device)
        except Exception as error:
            note = reason(error)
    return Measurement(gpu, wall, peak, moved, note)


Call = Callable[[Tensor], Outputs]


def _compiled(subject: TimedModule) -> Call:
    """The module compiled for these sizes alone."""
    torch.compiler.reset()  # else the shapes before this one count against a limit
    call: Any = torch.compile(subject.module, dynamic=False)
    return lambda x: call(x)


def _forward(subject: TimedModule, call: Call) -> tuple[Callable[[], object], int]:
    """A forward pass without gradients, and the bytes that it moves at least."""

    def run() -> Outputs:
        with torch.no_grad():
            return call(subject.x)

    return run, _bytes(subject.leaves) + _bytes(run())


def _decoding(subject: TimedModule, kind: str) -> tuple[Callable[[], object], None]:
    """One token after those of the input, without gradients."""
    name = {"step": "decoding", "decode": "decoder"}[kind]
    begin: Any = getattr(subject.module, name, None)
    if begin is None:
        raise TypeError(f"{type(subject.module).__name__} has no {name}")
    with torch.no_grad():
        step, x_t = begin(subject.x.detach()), subject.x.detach()[:, -1].contiguous()

    def run() -> object:
        with torch.no_grad():
            return step(x_t)

    return run, None


def _both(subject: TimedModule, call: Call) -> tuple[Callable[[], object], int]:
    """A forward and a backward pass, and the bytes that they move at least.

    Outputs are freed before the backward pass, as if the next layer owned them. Gradients are
    made afresh, as where an optimiser has set them to None.
    """

    def forward() -> Outputs:
        with record_ksvd(subject.module):
            return call(subject.x)

    outputs = forward()
    cotangents = [torch.randn_like(y) if y.ndim else torch.full_like(y, _ETA) for y in outputs]

    def run() -> Sequence[Tensor | None]:
        edges = [get_gradient_edge(y) for y in forward()]
        return torch.autograd.grad(edges, subject.leaves, cotangents, allow_unused=True)

    if not all(bool(grad.isfinite().all()) for grad in run() if grad is not None):
        raise ArithmeticError("a gradient is not finite")
    return run, 3 * _bytes(subject.leaves) + 2 * _bytes(outputs)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _less(both: Measurement, forward: Measurement) -> Measurement:
    """The backward pass: both passes less the forward pass; the memory is that of both."""

    def less(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a - b

    return Measurement(
        less(both.gpu_ms, forward.gpu_ms),
        less(both.wall_ms, forward.wall_ms),
        both.peak_mib,
        (both.moved or 0) - (forward.moved or 0),
        both.note or forward.note,
    )


def median(runs: Sequence[Measurement]) -> Measurement:
    """Return the median of each number over several runs; the rest is that of the first."""

    def of(*values: float | None) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    gpu, wall, peak, *_ = zip(*runs, strict=True)
    return runs[0]._replace(gpu_ms=of(*gpu), wall_ms=of(*wall), peak_mib=of(*peak))


def _let_go(device: torch.device) -> None:
    """Free the memory of the last subject."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
