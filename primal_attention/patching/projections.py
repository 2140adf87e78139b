"""What is read from an attention module of a foreign model.

Letters: D model dim, H heads, C head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


class Affine(NamedTuple):
    """A projection y = W x + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @classmethod
    def of(cls, linear: nn.Module) -> Affine:
        """The projection of a plain ``nn.Linear``; what wraps or quantises one is refused."""
        check_plain(linear, nn.Linear, NonDynamicallyQuantizableLinear)
        return cls(linear.weight, linear.bias)  # type: ignore[arg-type]

    def scaled(self, factor: float) -> Affine:
        """The projection times a number."""
        if factor == 1.0:
            return self
        return Affine(self.weight * factor, None if self.bias is None else self.bias * factor)

    def split(self, parts: int) -> list[Affine]:
        """The equal parts of a packed projection."""
        biases = [None] * parts if self.bias is None else self.bias.chunk(parts)
        return [Affine(*pair) for pair in zip(self.weight.chunk(parts), biases, strict=True)]

    def on_meta(self) -> Affine:
        """The same without data."""
        return Affine(self.weight.to("meta"), None if self.bias is None else self.bias.to("meta"))

    def linear(self) -> nn.Linear:
        """A module of its own with this projection, frozen where the host's was."""
        rows, columns = self.weight.shape
        with torch.device(self.weight.device):
            linear = nn.Linear(columns, rows, bias=self.bias is not None, dtype=self.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight)
            linear.weight.requires_grad_(self.weight.requires_grad)
            if self.bias is not None:
                linear.bias.copy_(self.bias)
                linear.bias.requires_grad_(self.bias.requires_grad)
        return linear


@dataclass(frozen=True)
class Parts:
    """The projections of one attention module, and how it is used."""

    q: Affine
    k: Affine
    v: Affine
    out: Affine
    num_heads: int
    causal: bool = False
    cross: bool = False  # keys and values come from another sequence
    dropout: float = 0.0  # after the output projection
    max_tokens: int | None = None  # the longest input, where the host has one

    @property
    def dim(self) -> int:
        """The model dimension D."""
        return self.out.weight.shape[0]

    def on_meta(self) -> Parts:
        """The same without data, to count with."""
        q, k, v, out = (affine.on_meta() for affine in (self.q, self.k, self.v, self.out))
        return replace(self, q=q, k=k, v=v, out=out)


def check_plain(projection: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise unless a projection is exactly of one of the kinds: others do more than W x + b."""
    kind = type(projection)
    if kind not in kinds:
        raise ValueError(
            f"a projection is a {kind.__module__}.{kind.__name__}, of which the weight is not all; "
            "patch before adding adapters or quantising, or merge them first"
        )


def score_factor(scaling: float, head_dim: int) -> float:
    """What to multiply queries with, for a host whose scores are not divided by sqrt(C)."""
    factor = scaling * math.sqrt(head_dim)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor
