"""The clause about threads: one module serves several at once."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.testing.probes import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    SEED,
    PassResult,
    Probe,
    compare_runs,
)
from primal_attention.testing.report import Findings, NotApplicable, deviation
from primal_attention.testing.subject import Subject

_THREADS = 8
_ROUNDS = 2
_PAUSE = 5e-4  # seconds
_MANY_TURNS = 1e-6  # seconds that a thread may go on while others wait

Served = tuple[PassResult, Tensor]
"""Outputs and gradients, and outputs without gradients."""


class _Waiting(nn.Module):
    """A layer that waits before it is called, and where it has an objective, before this is made.

    The objective, which a training pass leaves on the layer, is added to the output.
    """

    def __init__(
        self, layer: nn.Module, objective: Callable[[nn.Module], Tensor] | None, wait: Any
    ) -> None:
        super().__init__()
        self.layer, self.objective, self.wait = layer, objective, wait

    def forward(self, x: Tensor, **arguments: Tensor) -> Tensor:
        self.wait()
        y: Tensor = self.layer(x, **arguments)
        if self.objective is None:
            return y
        self.wait()
        return y + self.objective(self.layer)


def threads(subject: Subject) -> Findings:
    """Eight threads that call one module at once get what one thread gets, with gradients.

    So does training, where the module has an objective that is made of its last training pass.
    """
    findings = subject.findings(f"{_THREADS} threads at once get what one thread gets")
    for layer in (subject.copy(), _pausing(subject.copy())):
        _compare_at_once(findings, subject, layer)
    if subject.objective is not None:
        try:
            _compare_at_once(findings, subject, subject.copy().train())
        except NotApplicable as reason:
            findings.detail += f"; training not compared ({reason})"
        else:
            findings.detail += ", the objective after a training pass too"
    return findings


def _compare_at_once(findings: Findings, subject: Subject, layer: nn.Module) -> None:
    requests = [_request(subject, layer, number) for number in range(_THREADS)]
    _demand_repeatable(requests[0])
    wanted = [_served(subject, request, _nothing) for request in requests]
    barrier = Barrier(_THREADS)

    def rounds(request: Probe) -> list[Served]:
        try:
            return [_served(subject, request, barrier.wait) for _ in range(_ROUNDS)]
        except BaseException:
            barrier.abort()
            raise

    with _many_turns(), ThreadPoolExecutor(_THREADS) as pool:
        waiting = [pool.submit(rounds, request) for request in requests]
    errors = [error for each in waiting if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):  # which is what the others see
            raise error
    for number, (want, each) in enumerate(zip(wanted, waiting, strict=True), 1):
        for run, output in each.result():
            compare_runs(findings, f"thread {number}", run, want[0])
            what = f"thread {number}: outputs without gradients"
            findings.close(what, output, want[1], OUTPUT_BOUND)


def _request(subject: Subject, layer: nn.Module, number: int) -> Probe:
    """The request of one caller, with tokens, lengths and masks of its own."""
    batch, length = 1 + number % 3, 5 + 2 * number
    x = subject.tokens(batch, length, seed=number)
    probe = Probe(layer, x, subject.tokens(batch, length, seed=100 + number))
    if number % 2:
        mask = probe.real
        mask[:, :: number + 1] = False
        probe = probe._replace(token_mask=mask)
    if subject.takes_context and number % 4 > 1:
        probe = probe._replace(context=subject.tokens(batch, 4 + number, seed=-number))
    return probe


def _served(subject: Subject, request: Probe, wait: Callable[[], object]) -> Served:
    """Serve a request, and those of a causal module also by the state after most of its tokens."""
    layer: Any = request.layer
    objective = subject.objective if layer.training else None
    run = request._replace(layer=_Waiting(layer, objective, wait)).run()
    if layer.training:
        return run, run.output
    with torch.no_grad():
        wait()
        output = request.output()
        if subject.causal and hasattr(layer, "prefill") and hasattr(layer, "step"):
            y, state = layer.prefill(request.x[:, :-1])
            y_t, _ = layer.step(request.x[:, -1], state)
            output = torch.cat([output, y, y_t[:, None]], dim=1)
    return run, output


def _demand_repeatable(request: Probe) -> None:
    """Threads share the random number generator: what draws from it cannot be compared."""
    first = request.output()
    torch.manual_seed(SEED + 1)
    again = request.layer(request.x)
    if deviation(again, first) > GRADIENT_BOUND:
        raise NotApplicable("random numbers are drawn in each call, which threads would share")


def _pausing(layer: nn.Module) -> nn.Module:
    """The layer, in which each call of a submodule first lets the other threads go on.

    What a call keeps on the module between two submodules is then certain to be overwritten.
    """
    for module in layer.modules():
        if module is not layer:
            module.register_forward_pre_hook(lambda module, args: time.sleep(_PAUSE))
    return layer


def _nothing() -> None:
    """Alone, a thread need not wait."""


@contextmanager
def _many_turns() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_MANY_TURNS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
