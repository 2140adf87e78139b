"""Clauses about numbers: training mode, degenerate inputs and autocast."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.testing.calls import PassResult, forward_backward
from primal_attention.testing.findings import Findings, magnitude
from primal_attention.testing.subject import Subject
from primal_attention.testing.tokens import prefix_mask, real_only

_AUTOCAST_BOUND = 16 * 2.0**-8  # sixteen roundings to bfloat16
_GRADIENT_GROWTH = 1e6


def training_mode(subject: Subject) -> Findings:
    """Forward and backward in training mode run and are finite."""
    findings = subject.findings("forward and backward in training mode run and are finite")
    x = subject.tokens(3, 13)
    mask = prefix_mask((13, 8, 3), 13, subject.device)
    for label, token_mask in (("without a mask", None), ("with a mask", mask)):
        layer = subject.copy().train()
        run = forward_backward(layer, x, subject.tokens(3, 13, seed=1), token_mask=token_mask)
        findings.finite(f"training mode {label}", *_values(run))
    return findings


class _Case(NamedTuple):
    """A degenerate input; `bounded` where its gradients must also be of ordinary size."""

    label: str
    x: Tensor
    token_mask: Tensor | None
    bounded: bool


def _cases(x: Tensor) -> Iterator[_Case]:
    batch, length = x.shape[:2]
    yield _Case("zero input", torch.zeros_like(x), None, True)
    hole = x.clone()
    hole[:, 2] = 0
    yield _Case("a zero token among others", hole, None, True)
    yield _Case("constant input", x[:1, :1].expand_as(x), None, True)
    yield _Case("input of size 1e4", 1e4 * x, None, False)
    one, none = (prefix_mask([n] * batch, length, x.device) for n in (1, 0))
    yield _Case("one real token", x, one, True)
    yield _Case("one real token that is zero", torch.zeros_like(x), one, True)
    yield _Case("no real token", x, none, True)


def finite_values(subject: Subject) -> Findings:
    """Degenerate inputs give finite outputs and gradients; none explodes near a singular point.

    A gradient of 1e12 is finite and still ruins a training run, so gradients are also held to a
    million times those of an ordinary input, except for the input that is itself enormous.
    """
    findings = subject.findings(
        "degenerate inputs give finite outputs and gradients of ordinary size"
    )
    for dtype in (torch.float32, torch.bfloat16):
        layers = {"": subject.copy(dtype)}
        if subject.was_asleep:
            layers = {" as built": subject.as_built(dtype), " awake": layers[""]}
        for label, layer in layers.items():
            _observe_cases(findings, subject, layer, f"{dtype}{label}")
    return findings


def _observe_cases(findings: Findings, subject: Subject, layer: nn.Module, label: str) -> None:
    x, cotangent = subject.tokens(2, 7), subject.tokens(2, 7, seed=1)
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    usual = _largest_gradient(forward_backward(layer, x.to(dtype), cotangent))
    for case in _cases(x.to(dtype)):
        run = forward_backward(layer, case.x, cotangent, token_mask=case.token_mask)
        findings.finite(f"{case.label} in {label}", *_values(run))
        if case.bounded:
            growth = _largest_gradient(run) / max(usual, 1.0)
            findings.at_most(f"gradients of {case.label} in {label}", growth, _GRADIENT_GROWTH)


def _values(run: PassResult) -> list[Tensor]:
    return [run.output, run.d_input, *run.d_parameters.values()]


def _largest_gradient(run: PassResult) -> float:
    return max(map(magnitude, [run.d_input, *run.d_parameters.values()]))


def autocast(subject: Subject) -> Findings:
    """Under bfloat16 autocast outputs and gradients are near those of float32."""
    findings = subject.findings("under bfloat16 autocast, outputs and gradients are near float32's")
    layer = subject.copy()
    x = subject.tokens(3, 13)
    mask = prefix_mask((13, 8, 3), 13, subject.device)
    cotangent = real_only(subject.tokens(3, 13, seed=1), mask)
    want = forward_backward(layer, x, cotangent, token_mask=mask)
    low = torch.autocast(subject.device.type, dtype=torch.bfloat16)
    got = forward_backward(layer, x, cotangent, within=low, token_mask=mask)
    findings.finite("autocast", *_values(got))
    pairs = {"outputs": (got.output, want.output), "input gradients": (got.d_input, want.d_input)}
    if want.d_parameters:
        pairs["parameter gradients"] = (_joined(got), _joined(want))
    for what, (low_tensor, tensor) in pairs.items():
        findings.at_most(f"autocast: {what}", _relative_norm(low_tensor, tensor), _AUTOCAST_BOUND)
    return findings


def _relative_norm(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of `want`.

    Not the largest difference: where a feature map has a kink, rounding near it moves one gradient
    by a whole step, and rightly so.
    """
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-6))


def _joined(run: PassResult) -> Tensor:
    """All parameter gradients in one vector: some are rounding noise by themselves."""
    return torch.cat([gradient.flatten() for gradient in run.d_parameters.values()])
