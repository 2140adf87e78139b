"""Language models: causal stacks that read and write symbols.

Letters: B batch, N tokens, D model dim, V symbols.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.inputs import Tokens, check_mask
from primal_attention.attention.base.shards import Sharded
from primal_attention.attention.base.validation import check_probabilities, check_sizes
from primal_attention.models.embedding import check_symbols
from primal_attention.models.encoder import Encoder
from primal_attention.ops.causal import token_counts

_LONGEST_WAVE = 10_000.0  # in units of 2 pi tokens


class State(NamedTuple):
    """The decode state of a language model; all tensors have the batch first."""

    position: Tensor  # int64 [B]: of the next token
    layers: tuple[Any, ...]  # one state of each attention


class LanguageModel(Sharded):
    """Predicts each next token from those before it.

    Input and output share one table of vectors. Positions are sinusoids of the number of tokens
    before, so no length is the longest, unless an attention has a ``max_tokens`` of its own.

    Args:
        vocab_size: Number V of symbols.
        attentions: Causal attentions, one a layer.
        dim: Model dimension D.
        ffn_dim: Width of the feed-forward layers.
        dropout: Probability of dropout of the embedded tokens and in the blocks.
        **options: Those of :class:`EncoderBlock`: ``norm`` and ``activation``.
    """

    def __init__(
        self,
        vocab_size: int,
        attentions: Iterable[nn.Module],
        dim: int,
        ffn_dim: int,
        *,
        dropout: float = 0.0,
        **options: Any,
    ):
        check_sizes(vocab_size=vocab_size, dim=dim)
        check_probabilities(dropout=dropout)
        attentions = list(attentions)
        for i, attention in enumerate(attentions):
            if not getattr(attention, "causal", False):
                raise ValueError(
                    f"attentions[{i}], {type(attention).__name__}, is not causal: "
                    "a language model needs causal=True in every layer"
                )
        super().__init__()
        self.vocab_size, self.dim, self.dropout = vocab_size, dim, dropout
        self.tokens = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.tokens.weight, std=dim**-0.5)
        self.decoder = Encoder(attentions, dim, ffn_dim, dropout=dropout, **options)

    def forward(self, ids: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Compute logits [B, N, V] of the token after each of ids [B, N].

        What stands at padding, wherever that is, changes no logit of a real token.
        """
        check_symbols("ids", ids)
        check_mask("token_mask", token_mask, ids)
        ids = ids if token_mask is None else torch.where(token_mask, ids, 0)
        read = ids[:1] if token_mask is None else ids
        before = None if self.shard is None else self.shard.num_before(Tokens(read, token_mask))
        positions = token_counts(read, token_mask, before) - 1
        return self._logits(self.decoder(self._embed(ids, positions), token_mask=token_mask))

    def init_state(self, batch_size: int) -> State:
        """Return the state before the first token of ``batch_size`` sequences."""
        check_sizes(batch_size=batch_size)
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.tokens.weight.device)
        return State(position, self.decoder.init_state(batch_size))

    def prefill(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return logits [B, N, V] of tokens ids [B, N] that follow ``state``, and the state after.

        All are real tokens: prompts of one batch have the same length.
        """
        y, state = self._extend(ids, state)
        return self._logits(y), state

    def step(self, ids_t: Tensor, state: State) -> tuple[Tensor, State]:
        """Return logits [B, V] of the next token ids_t [B], and the state after it."""
        logits, state = self.prefill(ids_t[:, None], state)
        return logits[:, 0], state

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue the prompts ids [B, N] to [B, N + max_new_tokens].

        Dropout follows the mode of the model: call ``model.eval()`` first.

        Args:
            ids: Prompts of the same length, at least one token long.
            max_new_tokens: How many tokens to add.
            temperature: Divides the logits; 0 takes the most likely token.
            top_k: Draws among so many of the most likely tokens; among all where None.
            generator: Of the draws.
        """
        check_sizes(max_new_tokens=max_new_tokens, top_k=top_k)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {temperature}")
        state, new, written = None, ids, [ids]
        for _ in range(max_new_tokens):
            y, state = self._extend(new, state)
            new = _draw(self._logits(y[:, -1]), temperature, top_k, generator)
            written.append(new)
        return torch.cat(written, dim=1)

    def _extend(self, ids: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The inputs [B, N, D] of the output table at each token after a state."""
        check_symbols("ids", ids)
        B, N = ids.shape
        state = self.init_state(B) if state is None else state
        if state.position.shape[0] != B:
            raise ValueError(f"state is of {state.position.shape[0]} sequences, ids of {B}")
        positions = token_counts(ids, None, state.position) - 1
        y, layers = self.decoder.prefill(self._embed(ids, positions), state.layers)
        return y, State(state.position + N, layers)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids) * math.sqrt(self.dim)
        x = x + sinusoids(positions, self.dim).to(x.dtype)
        return F.dropout(x, self.dropout, self.training)

    def _logits(self, y: Tensor) -> Tensor:
        return F.linear(y, self.tokens.weight)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    r"""Compute sines, then cosines of $t \cdot 10000^{-2i/D}$ for positions t, [..., D] in float64.

    Positions of Vaswani et al. 2017, for any length. Late ones need the digits of float64.
    """
    pairs = torch.arange((dim + 1) // 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * _LONGEST_WAVE ** (-2 * pairs / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One symbol for each sequence of logits [B, V], as a column [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is None:
        return _sample(logits, temperature, generator)
    best = logits.topk(min(top_k, logits.shape[-1]))
    return best.indices.gather(-1, _sample(best.values, temperature, generator))


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    logits = logits.double()
    below = logits - logits.amax(-1, keepdim=True)  # low temperatures then overflow to -inf alone
    return torch.multinomial(F.softmax(below / temperature, -1), 1, generator=generator)
