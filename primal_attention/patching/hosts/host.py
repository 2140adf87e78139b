"""Describe a family of foreign models to patching: read, replace and restore its attentions.

Letters: D model dim, H heads, C head dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


class Affine(NamedTuple):
    """A projection y = W x + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @classmethod
    def of(cls, linear: nn.Module) -> Affine:
        """Read a plain ``nn.Linear``; refuse what wraps or quantises one."""
        check_plain(linear, nn.Linear, NonDynamicallyQuantizableLinear)
        return cls(linear.weight, linear.bias)  # type: ignore[arg-type]

    def scaled(self, factor: float) -> Affine:
        """Multiply the projection by a number."""
        if factor == 1.0:
            return self
        return Affine(self.weight * factor, None if self.bias is None else self.bias * factor)

    def rows(self, chosen: Tensor) -> Affine:
        """Select some of the outputs."""
        return Affine(self.weight[chosen], None if self.bias is None else self.bias[chosen])

    def split(self, number: int) -> list[Affine]:
        """Cut a packed projection into equal projections."""
        biases = [None] * number if self.bias is None else self.bias.chunk(number)
        return [Affine(*pair) for pair in zip(self.weight.chunk(number), biases, strict=True)]

    def linear(self) -> nn.Linear:
        """Copy the projection into a new module, frozen where the host's was."""
        rows, columns = self.weight.shape
        device, dtype = self.weight.device, self.weight.dtype
        linear = nn.Linear(columns, rows, self.bias is not None, device, dtype)
        for name, tensor in self._asdict().items():
            if tensor is not None:
                copied = tensor.detach().clone(memory_format=torch.contiguous_format)
                setattr(linear, name, nn.Parameter(copied, tensor.requires_grad))
        return linear


@dataclass(frozen=True)
class Projections:
    """The projections of one attention module, and how the host uses it.

    Args:
        q: Projection of queries, for scores divided by sqrt(C).
        k: Projection of keys.
        v: Projection of values.
        out: Output projection.
        num_heads: Number of heads H.
        causal: Each token sees itself and those before it.
        cross: Keys and values come from another sequence.
        dropout: Probability of dropout after the output projection.
        max_tokens: The longest input, where the host has one.
    """

    q: Affine
    k: Affine
    v: Affine
    out: Affine
    num_heads: int
    causal: bool = False
    cross: bool = False
    dropout: float = 0.0
    max_tokens: int | None = None

    @property
    def dim(self) -> int:
        """The model dimension D."""
        return self.out.weight.shape[0]


def check_plain(projection: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise unless a projection is exactly of one of the kinds: others do more than W x + b."""
    kind = type(projection)
    if kind not in kinds:
        raise ValueError(
            f"a projection is a {kind.__module__}.{kind.__name__}, of which the weight is not all; "
            "patch before adding adapters or quantising, or merge them first"
        )


def score_factor(scaling: float, head_dim: int) -> float:
    """Return the factor of queries for a host whose scores are not divided by sqrt(C)."""
    factor = scaling * math.sqrt(head_dim)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor


class Change(NamedTuple):
    """An attribute of a module, and a value: the new one to set, or the old one to restore."""

    owner: nn.Module
    attribute: str
    value: Any


@dataclass
class Record:
    """Options and replaced attributes of a patched layer, to save it and to undo it."""

    attention: str
    options: dict[str, Any]
    cross: bool  # it attends to another sequence than its own
    new: tuple[str, ...]  # its parameters, or modules of them, that the host did not have
    changes: list[Change] = field(default_factory=list)  # none where it came from a file


class PatchedAttention(nn.Module):
    """A mechanism of the registry behind the calling convention of a host.

    Subclasses translate the calls and masks of one kind of host into
    ``self.mechanism(x, context, token_mask=..., context_mask=...)``.

    Args:
        mechanism: The attention layer, with the projections of the host.
    """

    record: Record  # set when patch() puts the layer in place

    def __init__(self, mechanism: nn.Module):
        super().__init__()
        self.mechanism: Any = mechanism

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which calls this before it compiles a model."""
        raise RuntimeError(
            f"torch.jit.script cannot compile patched layers ({self.attention}), which are "
            "no TorchScript; use torch.jit.trace or torch.export, or unpatch(model)"
        )

    @property
    def patched(self) -> bool:
        """True where ``patch`` put the layer in place, False where it was built directly."""
        return hasattr(self, "record")

    @property
    def attention(self) -> str:
        """The name of the mechanism in messages."""
        return self.record.attention if self.patched else type(self.mechanism).__name__

    @property
    def causal(self) -> bool:
        """True where each token sees only itself and those before it."""
        return bool(self.mechanism.causal)

    def check_cross(self) -> None:
        """Raise unless an output depends on its own query and the context alone.

        A host says neither which queries are padding nor which come later: a mechanism that sums
        over them would let a decoder see its future.
        """
        attention, card = self.attention, self.mechanism.mechanism
        if not card.cross:
            raise ValueError(f"{attention} has no cross-attention")
        if card.sums_over_queries(self.mechanism):
            raise ValueError(
                f"the cross-attention of {attention} sums over all queries, padding and later "
                "tokens included, which the host does not tell apart; take another mechanism for "
                "it (primal with weights='sampled', linear, softmax_bn_sh), or patch the "
                "self-attentions by name"
            )


class Host(ABC):
    """One family of attention modules: how to recognise, read and replace them.

    Attributes:
        name: The family's name in messages.
        takes_over: Modules beside the attention, by their path from its parent, whose work the new
            layer does: the output projection where the host keeps it elsewhere.
    """

    name: str
    takes_over: tuple[str, ...] = ()

    @abstractmethod
    def owns(self, module: nn.Module) -> bool:
        """Return whether a module is an attention of this family."""

    @abstractmethod
    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> Projections:
        """Read its projections and use; raise a ValueError for what no mechanism can replace.

        The ancestors are the modules above it, from the model to its parent.
        """

    @abstractmethod
    def adapt(self, module: nn.Module, mechanism: nn.Module) -> PatchedAttention:
        """Put the mechanism behind the signature of the module."""

    def is_cross(self, module: nn.Module, parent: nn.Module) -> bool:
        """Return whether it attends to another sequence than its own."""
        return False

    def is_local(self, module: nn.Module) -> bool:
        """Return whether it attends within a window; ``layers="all"`` leaves it out."""
        return False

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[Change]:
        """Attributes of modules above the attention that must change, with their new values."""
        return []
