"""Clauses about captured graphs: torch.compile and torch.export equal eager execution."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.testing.probes import OUTPUT_BOUND, compare_runs, forward
from primal_attention.testing.report import Findings, error_line
from primal_attention.testing.subject import Subject

# The graph that the default backend would compile, run by eager kernels, so no compiler is needed.
# Plain "aot_eager" breaks correct modules: its elu_backward is traced with the wrong strides.
_BACKEND = "aot_eager_decomp_partition"


def compiled(subject: Subject) -> Findings:
    """Compiled as one graph, outputs and gradients equal eager execution."""
    findings = subject.findings("compiled as one graph, outputs and gradients equal eager's")
    captured = subject.copy()
    torch.compiler.reset()
    try:
        captured.compile(fullgraph=True, backend=_BACKEND)
        for label, probe in subject.probes(subject.prefix_mask((13, 8, 3))):
            with _quiet():
                got = probe._replace(layer=captured).run()
            compare_runs(findings, f"compiled {label}", got, probe.run())
    finally:
        torch.compiler.reset()
    return findings


def exported(subject: Subject) -> Findings:
    """An exported program gives the outputs of the module, at other lengths too if it can."""
    findings = subject.findings("the exported program equals the module at any sequence length")
    layer = subject.copy()
    x, mask = subject.tokens(3, 13), subject.prefix_mask((13, 8, 3))
    inputs = {13: (x, mask)}
    try:
        program = _export(layer, x, mask, dynamic=True)
        inputs[19] = (subject.tokens(3, 19), subject.prefix_mask((19, 8, 3)))
    except Exception as error:
        program = _export(layer, x, mask, dynamic=False)
        reason = error_line(error)
        findings.detail = f"the exported program equals the module at its own length ({reason})"
    for length, (tokens, token_mask) in inputs.items():
        got = forward(program, tokens, token_mask=token_mask)
        want = forward(layer, tokens, token_mask=token_mask)
        findings.close(f"exported, N={length}", got, want, OUTPUT_BOUND)
    return findings


def _export(layer: nn.Module, x: Tensor, mask: Tensor, *, dynamic: bool) -> nn.Module:
    shapes: Any = None
    x, mask = x.clone(), mask.clone()  # an export marks its inputs
    if dynamic:
        shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
        shapes[x] = shapes[mask] = {1: torch.export.Dim.DYNAMIC}
    with _quiet():
        program = torch.export.export(
            layer, (x,), {"token_mask": mask}, dynamic_shapes=shapes, strict=False
        )
        return program.module()


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the warnings and the graphs that PyTorch prints while it captures a module."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
