"""Clauses about the token mask: what is masked does not exist."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from primal_attention.testing.calls import forward_backward
from primal_attention.testing.findings import Findings
from primal_attention.testing.subject import Subject
from primal_attention.testing.tokens import (
    compare_runs,
    holed_mask,
    junk_like,
    keep,
    poison_like,
    prefix_mask,
    real_only,
)

_LENGTHS = (29, 17, 5)
_EXTRA = 12


def padding_invariance(subject: Subject) -> Findings:
    """Appending masked junk changes no output of a real token and no gradient."""
    findings = subject.findings("appended masked tokens change no real output and no gradient")
    x = subject.tokens(len(_LENGTHS), max(_LENGTHS))
    mask = prefix_mask(_LENGTHS, x.shape[1], subject.device)
    junk = keep(x, mask, junk_like(x, seed=1))
    _compare_padded(findings, subject, "lengths 29, 17, 5", junk, mask)
    _compare_padded(findings, subject, "one sequence", x[:1], None)
    _compare_padded(findings, subject, "one sequence with a mask", junk[1:2], mask[1:2])

    layer, cotangent = subject.copy(), subject.tokens(*x.shape[:2], seed=1)
    want = forward_backward(layer, x, cotangent)
    got = forward_backward(layer, x, cotangent, token_mask=torch.ones_like(mask))
    compare_runs(findings, "a mask that masks nothing", got, want)
    return findings


def _compare_padded(
    findings: Findings, subject: Subject, label: str, x: Tensor, mask: Tensor | None
) -> None:
    layer = subject.copy()
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    cotangent = real_only(subject.tokens(*x.shape[:2], seed=1), real)
    want = forward_backward(layer, x, cotangent, token_mask=mask)
    longer = torch.cat([x, junk_like(x[:, :_EXTRA], seed=2)], dim=1)
    got = forward_backward(
        layer,
        longer,
        pad(cotangent, (0, 0, 0, _EXTRA)),
        token_mask=pad(real, (0, _EXTRA), value=False),
    )
    compare_runs(findings, label, got, want, real=real)


def left_padding(subject: Subject) -> Findings:
    """Padding in front gives what the same padding at the end gives.

    A causal module is deaf to padding at its end whatever it does with it; in front, padding that
    is still counted reaches every real token.
    """
    findings = subject.findings("padding in front gives what padding at the end gives")
    width = max(_LENGTHS) + 2
    x = subject.tokens(len(_LENGTHS), width)
    mask = prefix_mask(_LENGTHS, width, subject.device)
    cotangent = real_only(subject.tokens(*x.shape[:2], seed=1), mask)
    layer = subject.copy()
    want = forward_backward(layer, x, cotangent, token_mask=mask)
    shifts = [width - length for length in _LENGTHS]
    left = forward_backward(
        layer, _shifted(x, shifts), _shifted(cotangent, shifts), token_mask=_shifted(mask, shifts)
    )
    back = [-shift for shift in shifts]
    got = left._replace(output=_shifted(left.output, back), d_input=_shifted(left.d_input, back))
    compare_runs(findings, "padding in front", got, want, real=mask)
    return findings


def _shifted(rows: Tensor, shifts: list[int]) -> Tensor:
    """Move the tokens of each row to the right, those at the end to the front."""
    moved = [row.roll(shift, dims=0) for row, shift in zip(rows, shifts, strict=True)]
    return torch.stack(moved)


def padded_positions(subject: Subject) -> Findings:
    """Outputs and gradients at padded positions are exactly 0, also where all is padding."""
    findings = subject.findings("outputs and gradients at padded positions are exactly 0")
    lengths = (*_LENGTHS, 0)
    x = subject.tokens(len(lengths), max(lengths))
    mask = prefix_mask(lengths, x.shape[1], subject.device)
    x = keep(x, mask, junk_like(x, seed=1))
    run = forward_backward(subject.copy(), x, subject.tokens(*x.shape[:2], seed=1), token_mask=mask)
    findings.zero("outputs at padded positions", run.output[:-1][~mask[:-1]])
    findings.zero("gradients at padded positions", run.d_input[:-1][~mask[:-1]])
    findings.zero("outputs of a sequence without real tokens", run.output[-1])
    findings.zero("gradients of a sequence without real tokens", run.d_input[-1])
    return findings


def mask_holes(subject: Subject) -> Findings:
    """The content of masked tokens in front, in the middle and at the end changes nothing."""
    findings = subject.findings("the content of masked tokens changes nothing, wherever they stand")
    x = subject.tokens(4, 23)
    mask = holed_mask(x.shape[1], subject.device)
    cotangent = real_only(subject.tokens(*x.shape[:2], seed=1), mask)
    layer = subject.copy()
    want = forward_backward(layer, real_only(x, mask), cotangent, token_mask=mask)
    for label, content in (("small", x), ("large", junk_like(x, seed=1))):
        got = forward_backward(layer, keep(x, mask, content), cotangent, token_mask=mask)
        compare_runs(findings, f"{label} masked tokens", got, want, real=mask)
        findings.zero(f"{label} masked tokens: their gradients", got.d_input[~mask])
    return findings


def poisoned_padding(subject: Subject) -> Findings:
    """NaN and inf at masked positions reach neither outputs nor gradients."""
    findings = subject.findings("NaN and inf at masked positions reach no output and no gradient")
    layer = subject.copy()
    x = subject.tokens(4, 23)
    masks = {
        "padding": prefix_mask((23, 17, 5, 1), x.shape[1], subject.device),
        "holes": holed_mask(x.shape[1], subject.device),
    }
    for label, mask in masks.items():
        cotangent = real_only(subject.tokens(*x.shape[:2], seed=1), mask)
        want = forward_backward(layer, real_only(x, mask), cotangent, token_mask=mask)
        got = forward_backward(layer, keep(x, mask, poison_like(x)), cotangent, token_mask=mask)
        compare_runs(findings, f"NaN and inf in {label}", got, want)
    return findings
