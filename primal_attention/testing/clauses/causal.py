"""Clauses for causal modules: the past does not see the future, and decoding equals it all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primal_attention.testing.probes import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    Probe,
    forward,
    holed_mask,
    junk_like,
    poison_like,
)
from primal_attention.testing.report import Findings, NotApplicable
from primal_attention.testing.subject import Subject

_DECODING_BOUND = 1e-5


def causality(subject: Subject) -> Findings:
    """Values, mask and number of the later tokens change no earlier output; gradients agree."""
    if not subject.causal:
        raise NotApplicable("checked with causal=True only")
    findings = subject.findings("later tokens change no earlier output")
    probes = dict(subject.probes(holed_mask(23, subject.device)))
    cotangent = probes["without a mask"].cotangent
    for label, probe in probes.items():
        for t in (1, 9, 22):
            everywhere = probe._replace(cotangent=cotangent)
            _compare_futures(findings, f"{label}, t={t}", everywhere, t)
    findings.detail += _describe_poison(probes["without a mask"])
    return findings


def _compare_futures(findings: Findings, label: str, probe: Probe, t: int) -> None:
    """Hold the first t outputs against those with other tokens, or none, from t on."""
    x, mask = probe.x, probe.token_mask
    changed = torch.cat([x[:, :t], junk_like(x[:, t:], seed=1)], dim=1)
    cut = probe._replace(x=x[:, :t], token_mask=None if mask is None else mask[:, :t])
    futures = {"another future": probe._replace(x=changed), "no future": cut}
    if mask is not None:
        flipped = torch.cat([mask[:, :t], ~mask[:, t:]], dim=1)
        futures["another mask of the future"] = probe._replace(token_mask=flipped)
    want = probe.output()[:, :t]
    for what, future in futures.items():
        findings.close(f"{what} {label}", future.output()[:, :t], want, OUTPUT_BOUND)

    cotangent = torch.zeros_like(x)
    cotangent[:, t - 1] = probe.cotangent[:, t - 1]
    later = probe._replace(cotangent=cotangent).run().d_input[:, t:]
    what = f"gradients of later tokens {label}"
    findings.close(what, later, torch.zeros_like(later), GRADIENT_BOUND)


def _describe_poison(probe: Probe) -> str:
    t = probe.x.shape[1] // 2
    poisoned = torch.cat([probe.x[:, :t], poison_like(probe.x[:, t:])], dim=1)
    output = probe._replace(x=poisoned).output()
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
    steps = x.unbind(dim=1)
    ways = {
        "step by step": steps,
        "prefill, then step": (x[:, :41], *steps[41:]),
        "prefill in chunks": torch.split(x, [1, 5, 34, 27], dim=1),
    }
    with torch.no_grad():
        for way, chunks in ways.items():
            findings.close(way, _decode(layer, chunks), want, _DECODING_BOUND)
        alone = _decode_alone(layer, x, row=1, prefix=41)
        findings.close("one row of the state", alone, want[1:2, 41], _DECODING_BOUND)
        _demand_wide_state(subject)
    return findings


def _decode(layer: Any, chunks: Sequence[Tensor]) -> Tensor:
    """Go on from the state with chunks [B, N, D] by `prefill` and tokens [B, D] by `step`."""
    state = layer.init_state(chunks[0].shape[0])
    _demand_state(state, chunks[0])
    outputs = []
    for chunk in chunks:
        y, state = (layer.step if chunk.ndim == 2 else layer.prefill)(chunk, state)
        _demand_shape("y_t" if chunk.ndim == 2 else "y", y, chunk)
        _demand_state(state, chunk)
        outputs.append(y[:, None] if chunk.ndim == 2 else y)
    return torch.cat(outputs, dim=1)


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
