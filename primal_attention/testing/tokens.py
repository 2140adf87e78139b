"""Masks, junk and poison for the clauses about padding, and how two runs are compared."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from primal_attention.testing.calls import PassResult
from primal_attention.testing.findings import Findings

OUTPUT_BOUND = 1e-6
GRADIENT_BOUND = 1e-5
_JUNK = 1e3


def prefix_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Mask [B, width] of sequences whose first `lengths[b]` tokens are real."""
    positions = torch.arange(width, device=device)
    return positions < torch.tensor(lengths, device=device)[:, None]


def holed_mask(width: int, device: torch.device) -> Tensor:
    """Mask [4, width] with masked tokens in front, in the middle, at the end and scattered."""
    mask = torch.ones(4, width, dtype=torch.bool, device=device)
    third = width // 3
    mask[0, :third] = False
    mask[1, third:-third] = False
    mask[2, -third:] = False
    mask[3, ::3] = False
    return mask


def keep(x: Tensor, mask: Tensor, instead: Tensor) -> Tensor:
    """The tokens `x` where the mask is True, `instead` elsewhere."""
    return torch.where(mask[..., None], x, instead)


def real_only(x: Tensor, mask: Tensor) -> Tensor:
    """The tokens `x` where the mask is True, 0 elsewhere."""
    return keep(x, mask, torch.zeros_like(x))


def junk_like(x: Tensor, *, seed: int) -> Tensor:
    """Large random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return (_JUNK * torch.randn(x.shape, generator=generator, dtype=torch.float32)).to(x.device)


def poison_like(x: Tensor) -> Tensor:
    """Tokens of NaN, inf and -inf in turn."""
    values = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype, device=x.device)
    turns = torch.arange(x.shape[1], device=x.device) % 3
    return values[turns][:, None].expand_as(x).clone()


def compare_runs(
    findings: Findings,
    label: str,
    got: PassResult,
    want: PassResult,
    *,
    real: Tensor | None = None,
    real_context: Tensor | None = None,
) -> None:
    """Record the deviations of outputs and gradients, at the real tokens where a mask is given.

    `got` may be longer than `want`; what it has beyond is left out.
    """
    N = want.output.shape[1]
    at = slice(None) if real is None else real
    findings.close(f"{label}: outputs", got.output[:, :N][at], want.output[at], OUTPUT_BOUND)
    d_got, d_want = got.d_input[:, :N][at], want.d_input[at]
    findings.close(f"{label}: input gradients", d_got, d_want, GRADIENT_BOUND)
    if got.d_context is not None and want.d_context is not None:
        at = slice(None) if real_context is None else real_context
        d_got, d_want = got.d_context[:, : want.d_context.shape[1]][at], want.d_context[at]
        findings.close(f"{label}: context gradients", d_got, d_want, GRADIENT_BOUND)
    for name, gradient in want.d_parameters.items():
        what = f"{label}: gradient of {name}"
        findings.close(what, got.d_parameters[name], gradient, GRADIENT_BOUND)
