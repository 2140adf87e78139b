"""The clause about threads: one module serves several at once."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.testing.probes import GRADIENT_BOUND, OUTPUT_BOUND, SEED, gradients_of
from primal_attention.testing.report import Findings, NotApplicable, deviation
from primal_attention.testing.subject import Subject

_THREADS = 8
_ROUNDS = 2
_PAUSE = 5e-4  # seconds
_MANY_TURNS = 1e-6  # seconds that a thread may go on while others wait

Results = dict[str, Tensor]
Wait = Callable[[], object]
Work = Callable[[Wait], Results]
"""Runs the module; calls the argument where all threads are to have come as far."""


class _Request(NamedTuple):
    """The request of one caller, with tokens, lengths and masks of its own."""

    x: Tensor
    arguments: dict[str, Tensor]
    cotangent: Tensor


def threads(subject: Subject) -> Findings:
    """Eight threads that call one module at once get what one thread gets, with gradients.

    So does training, where the module has an objective that is made of its last training pass.
    """
    requests = [_request(subject, number) for number in range(_THREADS)]
    findings = subject.findings(f"{_THREADS} threads at once get what one thread gets")
    for layer in (subject.copy(), _pausing(subject.copy())):
        serving = [_serving(subject, layer, request) for request in requests]
        _demand_repeatable(serving[0])
        _compare_at_once(findings, serving)
    if subject.objective is not None:
        _compare_training(findings, subject, requests)
    return findings


def _compare_training(findings: Findings, subject: Subject, requests: list[_Request]) -> None:
    layer = subject.copy().train()
    training = [_training(subject, layer, request) for request in requests]
    try:
        _demand_repeatable(training[0])
    except NotApplicable as reason:
        findings.detail += f"; training not compared ({reason})"
        return
    findings.detail += ", the objective after a training pass too"
    _compare_at_once(findings, training)


def _compare_at_once(findings: Findings, works: list[Work]) -> None:
    wanted = [work(_nothing) for work in works]
    barrier = Barrier(len(works))

    def rounds(work: Work) -> list[Results]:
        try:
            return [work(barrier.wait) for _ in range(_ROUNDS)]
        except BaseException:
            barrier.abort()
            raise

    with _many_turns(), ThreadPoolExecutor(len(works)) as pool:
        waiting = [pool.submit(rounds, work) for work in works]
    errors = [error for each in waiting if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):  # which is what the others see
            raise error
    made = [each.result() for each in waiting]
    for number, (want, results) in enumerate(zip(wanted, made, strict=True), 1):
        for name, tensor in want.items():
            worst = max(deviation(result[name], tensor) for result in results)
            bound = OUTPUT_BOUND if name in ("outputs", "prefill") else GRADIENT_BOUND
            findings.at_most(f"{name} of thread {number}", worst, bound * findings.rounding)


def _request(subject: Subject, number: int) -> _Request:
    batch, length = 1 + number % 3, 5 + 2 * number
    x = subject.tokens(batch, length, seed=number)
    arguments = {}
    if number % 2:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[:, :: number + 1] = False
        arguments["token_mask"] = mask
    if subject.takes_context and number % 4 > 1:
        arguments["context"] = subject.tokens(batch, 4 + number, seed=-number)
    return _Request(x, arguments, subject.tokens(batch, length, seed=100 + number))


def _serving(subject: Subject, layer: Any, request: _Request) -> Work:
    """Outputs and gradients in eval mode, and of a causal module those that follow a state."""
    x, arguments, cotangent = request
    decodes = subject.causal and hasattr(layer, "prefill") and hasattr(layer, "step")

    def work(wait: Wait) -> Results:
        wait()
        with torch.no_grad():
            made = {"outputs": layer(x, **arguments)}
            if decodes:
                y, state = layer.prefill(x[:, :-1])
                y_t, _ = layer.step(x[:, -1], state)
                made["prefill"] = torch.cat([y, y_t[:, None]], dim=1)
        return made | _gradients(layer, x, lambda x: (layer(x, **arguments) * cotangent).sum())

    return work


def _training(subject: Subject, layer: nn.Module, request: _Request) -> Work:
    x, arguments, cotangent = request
    objective = subject.objective
    assert objective is not None

    def work(wait: Wait) -> Results:
        def loss(x: Tensor) -> Tensor:
            task: Tensor = (layer(x, **arguments) * cotangent).sum()
            wait()
            values.append(objective(layer))
            return task + values[0]

        values: list[Tensor] = []
        made = _gradients(layer, x, loss)
        return made | {"objective": values[0].detach()}

    return work


def _gradients(layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Results:
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        made = gradients_of(loss(x), leaves)
    return {f"gradient of {name}": d for name, d in made.items()}


def _demand_repeatable(work: Work) -> None:
    """Threads share the random number generator: what draws from it cannot be compared."""
    torch.manual_seed(SEED)
    first = work(_nothing)
    torch.manual_seed(SEED + 1)
    again = work(_nothing)
    if any(deviation(again[name], tensor) > GRADIENT_BOUND for name, tensor in first.items()):
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
