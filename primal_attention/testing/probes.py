"""Probes of a module: a forward and a backward pass, their tokens and masks, and comparisons."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.testing.report import Findings

SEED = 20230923
OUTPUT_BOUND = 1e-6
GRADIENT_BOUND = 1e-5
_JUNK = 1e3


class PassResult(NamedTuple):
    """The output of one forward pass and the gradients of one backward pass."""

    output: Tensor  # [B, N, D]
    d_input: Tensor  # [B, N, D]
    d_context: Tensor | None  # [B, M, D]
    d_parameters: dict[str, Tensor]

    def rows(self, rows: Sequence[int]) -> "PassResult":
        """Select some sequences of the batch; gradients of parameters belong to no sequence."""
        d_context = None if self.d_context is None else self.d_context[rows]
        return PassResult(self.output[rows], self.d_input[rows], d_context, {})

    def values(self) -> list[Tensor]:
        """All but the gradient of the context."""
        return [self.output, self.d_input, *self.d_parameters.values()]


class Probe(NamedTuple):
    """A module, the arguments of a call, and the gradient of its output."""

    layer: nn.Module
    x: Tensor  # [B, N, D]
    cotangent: Tensor  # [B, N, D]
    token_mask: Tensor | None = None
    context: Tensor | None = None  # [B, M, D]
    context_mask: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """Mask of the real tokens [B, N]."""
        return ones_mask(self.x) if self.token_mask is None else self.token_mask

    def rows(self, rows: Sequence[int]) -> "Probe":
        """Select some sequences of the batch."""
        some: dict[str, Any] = {
            name: value[rows] for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        return self._replace(**some)

    def longer(self, extra: Tensor) -> "Probe":
        """Append masked tokens."""
        more = torch.zeros_like(extra)
        return self._replace(
            x=torch.cat([self.x, extra], dim=1),
            cotangent=torch.cat([self.cotangent, more], dim=1),
            token_mask=torch.cat([self.real, ~ones_mask(extra)], dim=1),
        )

    def output(self) -> Tensor:
        """Run the forward pass."""
        arguments = {
            name: getattr(self, name) for name in ("token_mask", "context", "context_mask")
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        return forward(self.layer, self.x, **given)

    def run(self, within: AbstractContextManager[object] | None = None) -> PassResult:
        """Run both passes; `within` surrounds the forward pass only.

        An input or a parameter that the output does not depend on has gradient 0.
        """
        leaves = {"x": self.x} if self.context is None else {"x": self.x, "context": self.context}
        inputs: dict[str, Any] = {
            name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()
        }
        with within or nullcontext():
            output = self._replace(**inputs).output()
        parameters = {name: p for name, p in self.layer.named_parameters() if p.requires_grad}
        value = (output * self.cotangent.to(output)).sum()
        d_inputs = gradients_of(value, inputs | {f".{name}": p for name, p in parameters.items()})
        d_parameters = {name: d_inputs[f".{name}"] for name in parameters}
        return PassResult(output.detach(), d_inputs["x"], d_inputs.get("context"), d_parameters)


def forward(layer: nn.Module, x: Tensor, **arguments: Tensor) -> Tensor:
    """Call the module from a fixed state of the random number generator.

    With the same random numbers in every call, a module that draws some in eval mode breaks the
    clause on determinism and not every comparison.
    """
    torch.manual_seed(SEED)
    output = layer(x, **arguments)
    if not isinstance(output, Tensor):
        raise TypeError(f"forward must return a Tensor, it returned {type(output).__name__}")
    return output


def gradients_of(
    value: Tensor, leaves: Mapping[str, Tensor], *, create_graph: bool = False
) -> dict[str, Tensor]:
    """Differentiate a number by each leaf; 0 where it does not depend on one."""
    made = torch.autograd.grad(
        value,
        list(leaves.values()),
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, made, strict=True))


def ones_mask(x: Tensor) -> Tensor:
    """Mask [B, N] of tokens [B, N, D] that are all real."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


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
    """Return the tokens `x` where the mask is True, `instead` elsewhere."""
    return torch.where(mask[..., None], x, instead)


def real_only(x: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens `x` where the mask is True, 0 elsewhere."""
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

    def compare(what: str, got: Tensor, want: Tensor, mask: Tensor | None, bound: float) -> None:
        at = slice(None) if mask is None else mask
        findings.close(f"{label}: {what}", got[:, : want.shape[1]][at], want[at], bound)

    compare("outputs", got.output, want.output, real, OUTPUT_BOUND)
    compare("input gradients", got.d_input, want.d_input, real, GRADIENT_BOUND)
    if got.d_context is not None and want.d_context is not None:
        d_got, d_want = got.d_context, want.d_context
        compare("context gradients", d_got, d_want, real_context, GRADIENT_BOUND)
    for name, gradient in want.d_parameters.items():
        what = f"{label}: gradient of {name}"
        findings.close(what, got.d_parameters[name], gradient, GRADIENT_BOUND)
