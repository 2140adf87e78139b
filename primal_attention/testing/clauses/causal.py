"""Clauses for causal modules: the past does not see the future, and decoding equals it all."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.testing.calls import forward, forward_backward
from primal_attention.testing.findings import Findings, NotApplicable
from primal_attention.testing.subject import Subject
from primal_attention.testing.tokens import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    holed_mask,
    junk_like,
    poison_like,
)

_DECODING_BOUND = 1e-5


def causality(subject: Subject) -> Findings:
    """Values, mask and number of the later tokens change no earlier output; gradients agree."""
    if not subject.causal:
        raise NotApplicable("checked with causal=True only")
    findings = subject.findings("later tokens change no earlier output")
    layer = subject.copy()
    x = subject.tokens(4, 23)
    mask = holed_mask(x.shape[1], subject.device)
    for label, token_mask in (("without a mask", None), ("with a mask", mask)):
        for t in (1, 9, 22):
            _compare_futures(findings, subject, layer, f"{label}, t={t}", x, token_mask, t)
    findings.detail += _describe_poison(layer, x)
    return findings


def _compare_futures(
    findings: Findings,
    subject: Subject,
    layer: nn.Module,
    label: str,
    x: Tensor,
    token_mask: Tensor | None,
    t: int,
) -> None:
    """Hold the first t outputs against those with other tokens, or none, from t on."""
    masks = {} if token_mask is None else {"token_mask": token_mask}
    want = forward(layer, x, **masks)[:, :t]
    changed = torch.cat([x[:, :t], junk_like(x[:, t:], seed=1)], dim=1)
    futures = {"another future": forward(layer, changed, **masks)}
    cut = {name: mask[:, :t] for name, mask in masks.items()}
    futures["no future"] = forward(layer, x[:, :t], **cut)
    if token_mask is not None:
        flipped = torch.cat([token_mask[:, :t], ~token_mask[:, t:]], dim=1)
        futures["another mask of the future"] = forward(layer, x, token_mask=flipped)
    for what, got in futures.items():
        findings.close(f"{what} {label}", got[:, :t], want, OUTPUT_BOUND)

    cotangent = torch.zeros_like(x)
    cotangent[:, t - 1] = subject.tokens(*x.shape[:2], seed=1)[:, t - 1]
    later = forward_backward(layer, x, cotangent, token_mask=token_mask).d_input[:, t:]
    findings.close(
        f"gradients of later tokens {label}", later, torch.zeros_like(later), GRADIENT_BOUND
    )


def _describe_poison(layer: nn.Module, x: Tensor) -> str:
    t = x.shape[1] // 2
    output = forward(layer, torch.cat([x[:, :t], poison_like(x[:, t:])], dim=1))
    if output[:, :t].isfinite().all():
        return "; NaN in the future stays there"
    return "; NaN in the future reaches the past (0 times NaN), which is not held against it"


def decoding(subject: Subject) -> Findings:
    """Step by step, prefill then step and prefill in chunks all equal the full pass."""
    if not subject.causal:
        raise NotApplicable("checked with causal=True only")
    layer: Any = subject.copy()
    if not (hasattr(layer, "step") and hasattr(layer, "init_state")):
        raise NotApplicable("no decode state")
    findings = subject.findings(
        "step by step, prefilled and in chunks, decoding equals the full pass"
    )
    x = subject.tokens(3, 67)
    want = forward(layer, x)
    with torch.no_grad():
        findings.close("step by step", _decode(layer, x, prefix=0), want, _DECODING_BOUND)
        findings.close("prefill, then step", _decode(layer, x, prefix=41), want, _DECODING_BOUND)
        chunks = torch.cat(list(_prefill_chunks(layer, x, (0, 1, 6, 40, 67))), dim=1)
        findings.close("prefill in chunks", chunks, want, _DECODING_BOUND)
        alone = _decode_alone(layer, x, row=1, prefix=41)
        findings.close("one row of the state", alone, want[1:2, 41], _DECODING_BOUND)
        _demand_wide_state(subject)
    return findings


def _decode(layer: Any, x: Tensor, *, prefix: int) -> Tensor:
    """Prefill the first `prefix` tokens, if any, and step through the rest."""
    outputs = []
    state = layer.init_state(x.shape[0])
    _demand_state(state, x)
    if prefix:
        y, state = layer.prefill(x[:, :prefix])
        outputs.append(y)
        _demand_state(state, x)
    for x_t in x[:, prefix:].unbind(dim=1):
        y_t, state = layer.step(x_t, state)
        _demand_shape("y_t", y_t, x_t)
        outputs.append(y_t[:, None])
    _demand_state(state, x)
    return torch.cat(outputs, dim=1)


def _prefill_chunks(layer: Any, x: Tensor, bounds: tuple[int, ...]) -> Iterator[Tensor]:
    state = layer.init_state(x.shape[0])
    for start, stop in pairwise(bounds):
        y, state = layer.prefill(x[:, start:stop], state)
        yield y


def _decode_alone(layer: Any, x: Tensor, *, row: int, prefix: int) -> Tensor:
    """Prefill a batch, then step with one row of its state: this is what batch first promises."""
    _, state = layer.prefill(x[:, :prefix])
    mine = type(state)(*(value[row : row + 1] for value in state))
    y_t: Tensor = layer.step(x[row : row + 1, prefix], mine)[0]
    return y_t


def _demand_wide_state(subject: Subject) -> None:
    """The state stays in float32 at least when the module is in bfloat16."""
    layer: Any = subject.copy(torch.bfloat16)
    x_t = subject.tokens(3, 1).to(torch.bfloat16)[:, 0]
    y_t, state = layer.step(x_t, layer.init_state(3))
    _demand_shape("y_t", y_t, x_t)
    _demand_state(state, x_t)


def _demand_shape(name: str, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(
            f"{name} is {tuple(got.shape)} of {got.dtype}, it should be {tuple(want.shape)} of "
            f"{want.dtype}"
        )


def _demand_state(state: Any, x: Tensor) -> None:
    if not (isinstance(state, tuple) and hasattr(state, "_fields")):
        raise TypeError(f"the state must be a NamedTuple of tensors, it is a {type(state)}")
    for name, value in zip(state._fields, state, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"state.{name} must be a Tensor, it is a {type(value).__name__}")
        if value.ndim == 0 or value.shape[0] != x.shape[0]:
            raise ValueError(
                f"state.{name} must have the batch first, its shape is {tuple(value.shape)} for "
                f"a batch of {x.shape[0]}"
            )
        if value.is_floating_point() and torch.finfo(value.dtype).bits < 32:
            raise ValueError(f"state.{name} must be at least float32, it is {value.dtype}")
