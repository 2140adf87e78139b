"""Mechanisms with queries, keys and values: projections around one method.

Letters: B batch, N tokens, T source tokens (N in self-attention), D model dim, H heads, C head dim.
"""

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.decoder import Decoding
from primal_attention.attention.base.inputs import (
    Tokens,
    check_inputs,
    real_tokens,
    zero_padding,
)
from primal_attention.attention.base.positions import check_rotary, rotary_positions, rotated
from primal_attention.attention.base.validation import check_heads, check_probabilities


class Options(TypedDict, total=False):
    """Options of every mechanism with queries, keys and values; see :class:`QKVAttention`."""

    causal: bool
    dropout: float
    bias: bool
    gate: bool
    rotary: bool


class _Signature:
    """The options of a class; each ``**options`` stands for those of the next class."""

    def __get__(self, layer: object, kind: type) -> inspect.Signature:
        if layer is not None:  # that of the class alone
            raise AttributeError("__signature__")
        found: dict[str, inspect.Parameter] = {}
        for each in kind.__mro__:
            if "__init__" in vars(each):
                _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
                named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
                found |= {one.name: one for one in named if one.name not in found}
                if len(named) == len(parameters):
                    break
        return inspect.Signature(list(found.values()))


class QKVAttention(nn.Module, ABC):
    """Projections around :meth:`attend`, which is the mechanism.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        causal: Each token sees itself and those before it.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
        gate: Multiply the outputs of the heads by the silu of a projection of the token.
        rotary: Turn queries and keys by their positions among the real tokens.
    """

    mechanism: ClassVar[Mechanism]
    shown: ClassVar[tuple[str, ...]] = ()  # attributes that are printed
    __signature__ = _Signature()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        gate: bool = False,
        rotary: bool = False,
    ):
        name, head_dim = type(self).__name__, check_heads(dim, num_heads)
        check_probabilities(dropout=dropout)
        if rotary and not self.mechanism.rotary:
            raise ValueError(f"rotary=True: {name} takes no rotary positions")
        if rotary:
            check_rotary(head_dim)
        if causal and not self.mechanism.causal:
            raise ValueError(f"causal=True: {name} has no causal form")
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.causal, self.dropout = causal, dropout
        self.gate, self.rotary = gate, rotary
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        if gate:
            self.gate_proj = nn.Linear(dim, dim, bias=bias)

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Attend from queries [B, N, H, C] to keys and values [B, T, H, C]: outputs [B, N, H, C].

        The masks, bool [B, N] and [B, T], are True at real tokens. What is returned at padded
        queries does not matter; padded keys must not count in anything.
        """

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention outputs [B, N, D] of x [B, N, D], zero at padded positions.

        Masks are bool [B, N], True at real tokens. With a context, keys and values come from it.
        """
        check_inputs(self.dim, x, context, token_mask, context_mask, causal=self.causal)
        if context is not None and not self.mechanism.cross:
            raise ValueError(f"context was given, but {type(self).__name__} has no cross-attention")
        tokens = real_tokens(x, token_mask)
        source = tokens if context is None else real_tokens(context, context_mask)
        return self._output(self._attended(tokens, source), tokens)

    def extra_repr(self) -> str:
        """Return the sizes and choices, for printing."""
        shown = "".join(f", {name}={getattr(self, name)!r}" for name in self.shown)
        return f"{self.dim}, {self.num_heads}, causal={self.causal}{shown}"

    def _attended(self, tokens: Tokens, source: Tokens) -> Tensor:
        """Outputs of the heads [B, N, H, C]."""
        return self.attend(*self._project(tokens, source), tokens.mask, source.mask)

    def _project(
        self, tokens: Tokens, source: Tokens, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; the tokens come after so many others, [B]."""
        q = self._by_head(self.q_proj(tokens.x))
        k, v = self._by_head(self.k_proj(source.x)), self._by_head(self.v_proj(source.x))
        if self.rotary:
            q = rotated(q, rotary_positions(*tokens, before))
            k = rotated(k, rotary_positions(*source, before))
        return q, k, v

    def _by_head(self, projected: Tensor) -> Tensor:
        return torch.unflatten(projected, -1, (self.num_heads, -1))

    def _output(self, out: Tensor, tokens: Tokens) -> Tensor:
        heads = out.flatten(-2)
        heads = heads * F.silu(self.gate_proj(tokens.x)) if self.gate else heads
        y = self.out_proj(heads)
        return zero_padding(F.dropout(y, self.dropout, self.training), tokens.mask)


class SharedQKAttention(QKVAttention):
    """A mechanism without ``k_proj``: ``attend`` gets k = q, and there is no cross-attention."""

    def __init__(self, dim: int, num_heads: int, **options: Any):
        super().__init__(dim, num_heads, **options)
        del self.k_proj

    def _project(
        self, tokens: Tokens, source: Tokens, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self._by_head(self.q_proj(tokens.x))
        return q, q, self._by_head(self.v_proj(tokens.x))


class DecodingAttention(QKVAttention, Decoding):
    """A mechanism whose causal form can go on from a state, token by token."""

    @abstractmethod
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Return outputs [B, N, H, C] of tokens that follow the state, and the state after them."""

    def _continued(self, x: Tensor, token_mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        tokens = real_tokens(x, token_mask)
        out, state = self._extended(tokens, state)
        return self._output(out, tokens), state

    def _extended(self, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        """Outputs of the heads [B, N, H, C] after a state, and the state after them."""
        before = self.num_before(state) if self.rotary else None
        return self.extend(*self._project(tokens, tokens, before), state, tokens.mask)

    def num_before(self, state: Any) -> Tensor:
        """Count the real tokens behind a state, [B], if the mechanism takes rotary positions."""
        raise NotImplementedError(type(self).__name__)
