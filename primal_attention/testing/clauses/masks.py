"""Clauses about masks: what is masked, in the input or in a context, does not exist."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from primal_attention.testing.probes import (
    Probe,
    compare_runs,
    holed_mask,
    junk_like,
    keep,
    ones_mask,
    poison_like,
)
from primal_attention.testing.report import Findings, NotApplicable, deviation
from primal_attention.testing.subject import Subject

_LENGTHS = (29, 17, 5)
_EXTRA = 12
_EXTRA_CONTEXT = 5


def padding_invariance(subject: Subject) -> Findings:
    """Appending masked junk changes no output of a real token and no gradient."""
    findings = subject.findings("appended masked tokens change no real output and no gradient")
    probe = subject.probe(subject.prefix_mask(_LENGTHS))
    probe = probe._replace(x=keep(probe.x, probe.real, junk_like(probe.x, seed=1)))
    probes = {
        "lengths 29, 17, 5": probe,
        "one sequence": probe.rows([0])._replace(token_mask=None),
        "one sequence with a mask": probe.rows([1]),
    }
    for label, each in probes.items():
        got = each.longer(junk_like(each.x[:, :_EXTRA], seed=2)).run()
        compare_runs(findings, label, got, each.run(), real=each.real)

    x, cotangent = (subject.tokens(*probe.x.shape[:2], seed=seed) for seed in (0, 1))
    unmasked = Probe(probe.layer, x, cotangent)
    got = unmasked._replace(token_mask=unmasked.real).run()
    compare_runs(findings, "a mask that masks nothing", got, unmasked.run())
    return findings


def left_padding(subject: Subject) -> Findings:
    """Padding in front gives what the same padding at the end gives.

    A causal module is deaf to padding at its end whatever it does with it; in front, padding that
    is still counted reaches every real token.
    """
    findings = subject.findings("padding in front gives what padding at the end gives")
    width = max(_LENGTHS) + 2
    mask = subject.prefix_mask(_LENGTHS, width)
    probe = subject.probe(mask)
    shifts = [width - length for length in _LENGTHS]
    x, cotangent = _shifted(probe.x, shifts), _shifted(probe.cotangent, shifts)
    left = probe._replace(x=x, cotangent=cotangent, token_mask=_shifted(mask, shifts)).run()
    back = [-shift for shift in shifts]
    got = left._replace(output=_shifted(left.output, back), d_input=_shifted(left.d_input, back))
    compare_runs(findings, "padding in front", got, probe.run(), real=mask)
    return findings


def _shifted(rows: Tensor, shifts: list[int]) -> Tensor:
    """Move the tokens of each row to the right, those at the end to the front."""
    moved = [row.roll(shift, dims=0) for row, shift in zip(rows, shifts, strict=True)]
    return torch.stack(moved)


def padded_positions(subject: Subject) -> Findings:
    """Outputs and gradients at padded positions are exactly 0, also where all is padding."""
    findings = subject.findings("outputs and gradients at padded positions are exactly 0")
    mask = subject.prefix_mask((*_LENGTHS, 0))
    probe = subject.probe(mask)
    x = keep(probe.x, mask, junk_like(probe.x, seed=1))
    run = probe._replace(x=x, cotangent=subject.tokens(*mask.shape, seed=1)).run()
    findings.zero("outputs at padded positions", run.output[:-1][~mask[:-1]])
    findings.zero("gradients at padded positions", run.d_input[:-1][~mask[:-1]])
    findings.zero("outputs of a sequence without real tokens", run.output[-1])
    findings.zero("gradients of a sequence without real tokens", run.d_input[-1])
    return findings


def mask_holes(subject: Subject) -> Findings:
    """The content of masked tokens in front, in the middle and at the end changes nothing."""
    findings = subject.findings("the content of masked tokens changes nothing, wherever they stand")
    mask = holed_mask(23, subject.device)
    probe = subject.probe(mask)
    contents = {"small": probe.x, "large": junk_like(probe.x, seed=1)}
    labelled = {f"{label} masked tokens": content for label, content in contents.items()}
    _compare_contents(findings, probe, labelled, real=mask)
    return findings


def poisoned_padding(subject: Subject) -> Findings:
    """NaN and inf at masked positions reach neither outputs nor gradients."""
    findings = subject.findings("NaN and inf at masked positions reach no output and no gradient")
    holes = holed_mask(23, subject.device)
    masks = {"padding": subject.prefix_mask((23, 17, 5, 1)), "holes": holes}
    for label, mask in masks.items():
        probe = subject.probe(mask)
        _compare_contents(findings, probe, {f"NaN and inf in {label}": poison_like(probe.x)})
    return findings


def _compare_contents(
    findings: Findings,
    probe: Probe,
    contents: Mapping[str, Tensor],
    *,
    real: Tensor | None = None,
) -> None:
    """Hold contents of what is masked, in the context if there is one, against zeros there."""
    if probe.context is None:
        name, tokens, mask = "x", probe.x, probe.real
    else:
        assert probe.context_mask is not None
        name, tokens, mask = "context", probe.context, probe.context_mask

    def filled(content: Tensor) -> Probe:
        tokens_of: dict[str, Any] = {name: keep(tokens, mask, content)}
        return probe._replace(**tokens_of)

    want = filled(torch.zeros_like(tokens)).run()
    for label, content in contents.items():
        got = filled(content).run()
        compare_runs(findings, label, got, want, real=real)
        gradients = got.d_input if got.d_context is None else got.d_context
        findings.zero(f"{label}: gradients at masked tokens", gradients[~mask])


def cross_attention(subject: Subject) -> Findings:
    """Masked tokens of the context or the input change nothing; sequences stay apart."""
    if not subject.takes_context:
        raise NotApplicable(f"no context: {subject.no_context_because}")
    findings = subject.findings("masked context changes no output and no gradient")
    x, context = subject.tokens(4, 7), subject.tokens(4, 11, seed=1)
    plain = Probe(subject.copy(), x, subject.tokens(4, 7, seed=3), context=context)
    other = plain._replace(context=subject.tokens(4, 11, seed=2))
    change = deviation(other.output(), plain.output())
    findings.at_least("change of the output with the context", change, 1e-4)
    masked = plain._replace(context_mask=subject.prefix_mask((11, 6, 3, 1)))
    for label, probe in (("context", plain), ("context with a mask", masked)):
        _compare_padded_context(findings, label, probe, context)

    holed = plain._replace(context_mask=holed_mask(context.shape[1], x.device))
    contents = {"junk": junk_like(context, seed=1), "NaN and inf": poison_like(context)}
    labelled = {f"{label} in masked context": content for label, content in contents.items()}
    _compare_contents(findings, holed, labelled)
    empty = plain._replace(context_mask=~ones_mask(context)).run()
    findings.finite("no real context", empty.output, empty.d_input)

    longer = plain.longer(poison_like(x[:, :_EXTRA_CONTEXT]))
    got = longer.run()
    compare_runs(findings, "padded input with a context", got, plain.run())
    findings.zero("padded outputs with a context", got.output[~longer.real])
    findings.zero("padded gradients with a context", got.d_input[~longer.real])

    batch = masked.run()
    for row in range(x.shape[0]):
        alone = masked.rows([row]).run()
        label = f"sequence {row} and its context alone"
        compare_runs(findings, label, alone, batch.rows([row]))
    return findings


def _compare_padded_context(findings: Findings, label: str, probe: Probe, context: Tensor) -> None:
    extra = junk_like(context[:, :_EXTRA_CONTEXT], seed=1)
    real = ones_mask(context) if probe.context_mask is None else probe.context_mask
    got = probe._replace(
        context=torch.cat([context, extra], dim=1),
        context_mask=torch.cat([real, ~ones_mask(extra)], dim=1),
    ).run()
    compare_runs(findings, f"padded {label}", got, probe.run(), real_context=real)
