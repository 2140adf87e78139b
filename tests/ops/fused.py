"""Running fused ops in the tests: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from primal_attention.ops.op import FusedOp, fused_ops

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="compiles for the GPU")),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
MAPS = "cosine", "elu", "relu", "identity"  # those of the fused ops
# Norm of the error by the norm of the result. The interpreter cuts digits off where a GPU rounds.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that whatever an op leaves unwritten is seen."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the error by the norm of what is expected."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected).norm()
    return float(difference / expected.norm()) if expected.any() else float(difference)


def assert_near(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, what: str = ""
) -> None:
    """Every tensor within a tolerance of what float64 gives."""
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        found = error(one, other)
        assert found <= tolerance, f"{what} tensor {number}: error {found:.2e} > {tolerance:.2e}"


def assert_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Every tensor the same in every bit."""
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {number} differs"


def assert_same_as_eager(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    tolerance: float,
    *,
    skipped: Sequence[int] = (),
) -> None:
    """A public op gives what its eager form gives in float64, in values and all gradients.

    ``run`` takes the tensors; outputs whose numbers are skipped get no gradients.
    """
    found, calls = _with_counted_calls(lambda: _values_and_gradients(run, tensors, skipped))
    assert calls, "nothing ran fused"
    exact = [None if x is None else x.double() for x in tensors]
    with fused_ops("never"):
        expected = _values_and_gradients(run, exact, skipped)
    for what, one, other in zip(("value", "gradient"), found, expected, strict=True):
        assert_near(one, other, tolerance, what)


def _with_counted_calls(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of fused ops alone, and how many of them ran."""
    calls: list[str] = []
    forward = FusedOp._compute

    def counted(self: FusedOp, given: Any, **options: Any) -> Any:
        calls.append(self.name)
        return forward(self, given, **options)

    with fused_ops("always"), patch.object(FusedOp, "_compute", counted):
        return run(), len(calls)


def _values_and_gradients(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    skipped: Sequence[int] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    outputs = list(run(*leaves))
    pairs = [
        (y, torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).to(y))
        for i, y in enumerate(outputs)
        if i not in skipped
    ]
    ys, ds = zip(*pairs, strict=True)
    given = [x for x in leaves if x is not None]
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(ys, given, ds, **options)
    return [y.detach() for y in outputs], list(grads)


class Build(NamedTuple):
    """What one fused op takes of a multiprocessor."""

    case: str
    name: str
    registers: int
    stack: int  # bytes that did not fit the registers
    astray: int  # products that read anywhere
    described: int  # loads by descriptors
    shared: int  # bytes of shared memory


def built_for_hopper(program: str, *cases: str) -> list[Build]:
    """What each case would launch on a Hopper GPU, from a file of this folder run as a program."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (tools / name).exists()]
    if missing:
        pytest.skip(f"this Triton comes without {' and '.join(missing)}")
    result = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *cases],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    builds = [Build(case, name, *map(int, numbers)) for case, name, *numbers in rows]
    assert {build.case for build in builds} == set(cases)
    return builds


def assert_fits(build: Build, *, spilled: int = 0) -> None:
    """No more spilled than so many bytes of a thread, no more shared memory than there is.

    And no product that reads anywhere.
    """
    assert build.astray == 0, build
    assert build.shared <= 227 << 10, build
    assert build.stack <= spilled, build
