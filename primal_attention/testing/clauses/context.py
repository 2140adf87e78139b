"""The clause about cross-attention: a context is masked as strictly as the input."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from primal_attention.testing.calls import forward, forward_backward
from primal_attention.testing.findings import Findings, NotApplicable, deviation
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

_EXTRA = 5


def cross_attention(subject: Subject) -> Findings:
    """Masked tokens of the context or the input change nothing; sequences stay apart."""
    if not subject.takes_context:
        raise NotApplicable(f"no context: {subject.no_context_because}")
    layer = subject.copy()
    x, context = subject.tokens(4, 7), subject.tokens(4, 11, seed=1)
    findings = subject.findings("masked context changes no output and no gradient")
    other = forward(layer, x, context=subject.tokens(4, 11, seed=2))
    change = deviation(other, forward(layer, x, context=context))
    findings.at_least("change of the output with the context", change, 1e-4)
    _compare_padded_context(findings, subject, layer, x, context)
    _compare_masked_content(findings, subject, layer, x, context)
    _compare_padded_input(findings, subject, layer, x, context)
    _compare_alone(findings, subject, layer, x, context)
    return findings


def _compare_padded_context(
    findings: Findings, subject: Subject, layer: nn.Module, x: Tensor, context: Tensor
) -> None:
    cotangent = subject.tokens(*x.shape[:2], seed=3)
    longer = torch.cat([context, junk_like(context[:, :_EXTRA], seed=1)], dim=1)
    whole = torch.ones(context.shape[:2], dtype=torch.bool, device=x.device)
    some = prefix_mask((11, 6, 3, 1), context.shape[1], x.device)
    for label, mask, real in (("context", None, whole), ("context with a mask", some, some)):
        want = forward_backward(layer, x, cotangent, context=context, context_mask=mask)
        longer_mask = pad(real, (0, _EXTRA), value=False)
        got = forward_backward(layer, x, cotangent, context=longer, context_mask=longer_mask)
        compare_runs(findings, f"padded {label}", got, want, real_context=real)


def _compare_masked_content(
    findings: Findings, subject: Subject, layer: nn.Module, x: Tensor, context: Tensor
) -> None:
    cotangent = subject.tokens(*x.shape[:2], seed=3)
    mask = holed_mask(context.shape[1], x.device)
    want = forward_backward(
        layer, x, cotangent, context=real_only(context, mask), context_mask=mask
    )
    contents = {"junk": junk_like(context, seed=1), "NaN and inf": poison_like(context)}
    for label, content in contents.items():
        changed = keep(context, mask, content)
        got = forward_backward(layer, x, cotangent, context=changed, context_mask=mask)
        compare_runs(findings, f"{label} in masked context", got, want)
        assert got.d_context is not None
        findings.zero(f"{label} in masked context: its gradients", got.d_context[~mask])
    nothing = torch.zeros_like(mask)
    empty = forward_backward(layer, x, cotangent, context=context, context_mask=nothing)
    findings.finite("no real context", empty.output, empty.d_input)


def _compare_padded_input(
    findings: Findings, subject: Subject, layer: nn.Module, x: Tensor, context: Tensor
) -> None:
    cotangent = subject.tokens(*x.shape[:2], seed=3)
    want = forward_backward(layer, x, cotangent, context=context)
    longer = torch.cat([x, poison_like(x[:, :_EXTRA])], dim=1)
    mask = prefix_mask([x.shape[1]] * x.shape[0], longer.shape[1], x.device)
    cotangent = pad(cotangent, (0, 0, 0, _EXTRA))
    got = forward_backward(layer, longer, cotangent, context=context, token_mask=mask)
    compare_runs(findings, "padded input with a context", got, want)
    findings.zero("padded outputs with a context", got.output[~mask])
    findings.zero("padded gradients with a context", got.d_input[~mask])


def _compare_alone(
    findings: Findings, subject: Subject, layer: nn.Module, x: Tensor, context: Tensor
) -> None:
    cotangent = subject.tokens(*x.shape[:2], seed=3)
    mask = prefix_mask((11, 6, 3, 1), context.shape[1], x.device)
    batch = forward_backward(layer, x, cotangent, context=context, context_mask=mask)
    for row in range(x.shape[0]):
        at = slice(row, row + 1)
        alone = forward_backward(
            layer, x[at], cotangent[at], context=context[at], context_mask=mask[at]
        )
        want = batch._replace(
            output=batch.output[at],
            d_input=batch.d_input[at],
            d_context=None if batch.d_context is None else batch.d_context[at],
            d_parameters={},
        )
        compare_runs(findings, f"sequence {row} and its context alone", alone, want)
