"""Primal-Attention as a layer.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.causal import PrimalState, first_state
from primal_attention.attention.features import FeaturePair
from primal_attention.attention.folded import FoldedPrimalAttention, fold_static
from primal_attention.attention.masks import Tokens, check_inputs, real_tokens, zero_padding
from primal_attention.attention.mechanism import Mechanism
from primal_attention.attention.options import (
    check_choice,
    check_heads,
    check_probabilities,
    check_sizes,
)
from primal_attention.attention.packed import (
    Sequences,
    check_alone,
    packed_sequences,
    position_wise_pass,
)
from primal_attention.attention.packing import (
    in_projected_dtype,
    is_one_map,
    is_plain,
    outputs_of,
    packed_projection,
    projected,
    projected_rows,
    score_projection,
)
from primal_attention.attention.passes import (
    Parts,
    Pass,
    Projected,
    bidirectional_pass,
    causal_pass,
    projected_pass,
    scored_pass,
)
from primal_attention.attention.released import read_released
from primal_attention.attention.statistics import KSVDLayer, Scored, ksvd_statistics
from primal_attention.attention.weights import check_weights
from primal_attention.feature_maps import FeatureMapSpec
from primal_attention.ops.landmarks import Landmarks, choose_landmarks
from primal_attention.precision import accumulation_dtype


class PrimalAttention(KSVDLayer):
    r"""Self-attention as the singular value decomposition of its kernel, in the primal.

    $o_i = \mathrm{score\_proj}([e_i; r_i])$ with $e_i = W_{e|X}^\top \phi_q(x_i)$ and
    $r_i = W_{r|X}^\top \phi_k(x_i)$, eq. (9) of Chen et al. 2023: linear in the number of tokens.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        num_directions: Number s of singular directions of each head.
        weights: Where $W_{e|X}, W_{r|X}$ come from.
            ``"sampled"``: the paper's data-dependent weights $X'^\top w_e$ from M landmarks X' of
            the layer's input, evenly spaced over the real tokens.
            ``"static"``: parameters alone (F_X the identity). Then a token sees no other token
            unless ``causal`` (or the map has a normaliser): the layer is position-wise.
            ``"dual"``: the stationarity conditions of eq. (14), $W_{e|X} = \Phi_k^\top H_r / n$ and
            $W_{r|X} = \Phi_q^\top H_e / n$ with H_e, H_r projected from the input.
        max_tokens: Upper bound of M; longer inputs are sampled.
        samples_per_direction: M is this many times ``num_directions``.
        landmark_dropout: In training, drops whole landmarks with this probability.
        landmark_jitter: In training, moves landmarks within so many landmark spacings.
        gain: The Frobenius norm that each head's w_e and w_r start with (1 as released; the root of
            ``num_directions`` makes the directions unit vectors, on average). Not of dual weights.
        feature_map: ``cosine``, ``exponential``, ``elu``, ``relu``, ``identity``, a
            :class:`~primal_attention.feature_maps.FeatureMap`, or a pair (queries, keys) of these.
        causal: Each token sees itself and those before it. With static weights q and k become
            running means; dual weights are means up to the token; sampled weights cannot be causal.
        scores: What is output, ``both``, ``e`` or ``r``; the objectives always use both.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Chen et al., 2023", "N", causal=True, cross=True, decode="two sums of constant size"
    )

    def __init__(  # noqa: PLR0913 - each option is a line of the docstring above
        self,
        dim: int,
        num_heads: int,
        num_directions: int = 32,
        *,
        weights: str = "sampled",
        max_tokens: int | None = None,
        samples_per_direction: int = 10,
        landmark_dropout: float = 0.0,
        landmark_jitter: float = 0.0,
        gain: float = 1.0,
        feature_map: FeatureMapSpec = "cosine",
        causal: bool = False,
        scores: str = "both",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        head_dim = check_heads(dim, num_heads)
        check_sizes(
            num_directions=num_directions,
            samples_per_direction=samples_per_direction,
            max_tokens=max_tokens,
        )
        check_weights(weights, causal=causal, gain=gain, landmark_jitter=landmark_jitter)
        check_choice("scores", scores, ("both", "e", "r"))
        check_probabilities(landmark_dropout=landmark_dropout, dropout=dropout)
        super().__init__(num_heads, num_directions)
        self.dim, self.head_dim = dim, head_dim
        self.weights, self.causal, self.scores = weights, causal, scores
        self.landmark_dropout, self.landmark_jitter = landmark_dropout, landmark_jitter
        self.gain, self.dropout = gain, dropout
        self.features = FeaturePair(feature_map, head_dim)
        if weights == "sampled" and self.features.feature_dim != head_dim:
            raise ValueError(
                f"weights='sampled' needs a feature_map with as many features as head dimensions, "
                f"got {self.features.feature_dim} features and {head_dim=}"
            )
        wanted = num_directions * samples_per_direction
        self.num_landmarks = wanted if max_tokens is None else min(wanted, max_tokens)

        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        if weights == "dual":
            self.h_proj = nn.Linear(dim, 2 * num_heads * num_directions, bias=bias)
        else:
            rows = self.num_landmarks if weights == "sampled" else self.features.feature_dim
            self.w_e = nn.Parameter(torch.empty(num_heads, rows, num_directions))
            self.w_r = nn.Parameter(torch.empty(num_heads, rows, num_directions))
        sides = 2 if scores == "both" else 1
        self.score_proj = nn.Linear(sides * num_directions, head_dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w_e, w_r (orthogonal over the heads, as released) and Lambda, uniform in (0, 1)."""
        if self.weights != "dual":
            nn.init.orthogonal_(self.w_e, self.gain)
            nn.init.orthogonal_(self.w_r, self.gain)
        self.reset_lambda()

    @classmethod
    def from_released(
        cls, state_dict: Mapping[str, Tensor], *, dropout: float = 0.0
    ) -> PrimalAttention:
        """The layer with the parameters of one layer trained with the authors' released code.

        Whether it samples, or is causal with static weights, follows from the parameter names.
        """
        released = read_released(state_dict)
        layer = cls(**released.options, dropout=dropout).to(released.lambda_diag)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name != "raw_lambda":  # a projection without a bias gets the zero one
                    parameter.copy_(released.parameters.get(name, torch.zeros(())))
        layer.lambda_diag = released.lambda_diag
        return layer

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention outputs [B, N, D] of x [B, N, D], zero at padded positions.

        Masks are bool [B, N], True at real tokens. With a context (sampled and dual weights only)
        the landmarks and the key side of the kernel come from it.

        With ``cu_seqlens`` (int32 or int64 [B + 1], from 0 to T, never decreasing) x [T, D] or
        [1, T, D] holds B sequences one after the other, and so do the outputs. ``max_seqlen`` is
        the length of the longest or more; without it a GPU has to be waited for, which neither
        ``torch.compile`` nor a CUDA graph allows. What ``cu_seqlens`` holds is checked on a CPU
        alone, for the same reason.
        """
        if cu_seqlens is not None:
            check_alone(context=context, token_mask=token_mask, context_mask=context_mask)
            return self._packed(x, packed_sequences(x, cu_seqlens, max_seqlen, self.dim))
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} was given without cu_seqlens")
        self._check_inputs(x, context, token_mask, context_mask)
        tokens = self._tokens(x, token_mask)
        source = tokens if context is None else self._tokens(context, context_mask)
        parts = self._parts(tokens)
        run = self._run(parts, tokens, source)
        if self.training:
            num_queries = tokens.num_real()
            num_keys = num_queries if source is tokens else source.num_real()
            self._record(parts, run, num_queries, num_keys)
        return self._output(parts, run, tokens)

    def init_state(self, batch_size: int) -> PrimalState:
        """The state before the first token of ``batch_size`` sequences."""
        self._check_causal("init_state")
        P = self.features.feature_dim
        side = (self.head_dim,) if self.weights == "static" else (P, self.num_directions)
        key_features = P if self.features.normalised else 0
        return first_state(outputs_of(self.q_proj), batch_size, self.num_heads, side, key_features)

    def prefill(
        self, x: Tensor, state: PrimalState | None = None, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, PrimalState]:
        """Outputs [B, N, D] of the tokens x that follow ``state``, and the state after them."""
        self._check_causal("prefill")
        self._check_inputs(x, None, token_mask, None)
        if state is not None and state.num_tokens.shape[0] != x.shape[0]:
            raise ValueError(
                f"state is of {state.num_tokens.shape[0]} sequences, x has {x.shape[0]}"
            )
        if self.weights == "static" and self.w_e.is_meta and not x.is_meta:
            raise RuntimeError(
                "prefill and step need w_e and w_r, which are offloaded and loaded by layer(x) "
                "alone; keep them on a device, or generate without a cache (use_cache=False)"
            )
        tokens = self._tokens(x, token_mask)
        parts = self._parts(tokens)
        run, state = self._causal(parts, tokens, state, grams=False)
        return self._output(parts, run, tokens), state

    def step(self, x_t: Tensor, state: PrimalState) -> tuple[Tensor, PrimalState]:
        """Output [B, D] of the next token x_t [B, D], in time that does not grow."""
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state

    def fold(self) -> FoldedPrimalAttention:
        """An inference module with the static weights folded into two matrices."""
        if self.weights != "static":
            raise ValueError(
                f"fold needs weights='static', got {self.weights!r}, which depend on the input"
            )
        for name in ("q_proj", "k_proj", "score_proj", "out_proj"):
            if not is_plain(getattr(self, name)):
                raise ValueError(
                    f"fold needs plain nn.Linear projections, but {name} is wrapped, replaced or "
                    f"has hooks; merge adapters and remove hooks first"
                )
        return fold_static(
            self.q_proj,
            self.k_proj,
            self.out_proj,
            self.features,
            (self.w_e, self.w_r),
            self._score_maps(self.score_proj.weight),
            self.score_proj.bias,
            self.init_state(1) if self.causal else None,
        )

    def extra_repr(self) -> str:
        """The sizes and choices, for printing."""
        return (
            f"{self.dim}, {self.num_heads}, {self.num_directions}, weights={self.weights!r}, "
            f"causal={self.causal}, scores={self.scores!r}"
        )

    def _tokens(self, x: Tensor, mask: Tensor | None) -> Tokens:
        """Whatever the layer makes of them is made of one copy, which is all that it keeps."""
        return real_tokens(in_projected_dtype(x, *self._projections()), mask)

    def _causal(
        self, parts: Parts, tokens: Tokens, state: PrimalState | None, *, grams: bool
    ) -> tuple[Pass, PrimalState]:
        """The tokens that follow a state, and the state after them."""
        state = self.init_state(tokens.x.shape[0]) if state is None else state
        return causal_pass(parts, self._project(tokens), state, grams=grams)

    def _run(self, parts: Parts, tokens: Tokens, source: Tokens) -> Pass:
        """Queries of the tokens, keys of the source; the same sequence in self-attention."""
        landmarks, crossing = self._landmarks(source), source is not tokens
        options = {"causal": self.causal, "grams": self.training}
        if not crossing and not self.features.has_modules:  # one op from the tokens to the outputs
            projection = packed_projection(tokens.x, *self._projections())
            if projection is not None and self._maps_scores(tokens.x):
                return scored_pass(parts, tokens, projection, landmarks, causal=self.causal)
            if projection is not None:
                return projected_pass(parts, tokens, projection, landmarks, **options)
        if self.causal:
            return self._causal(parts, tokens, None, grams=self.training)[0]
        here = self._project(tokens)
        there = self._project(source, context=True) if crossing else here
        return bidirectional_pass(parts, here, there, landmarks, grams=self.training)

    def _maps_scores(self, x: Tensor) -> bool:
        """Whether the output projection is to map the scores, with the maps of the heads in it.

        A CPU has fewer multiplications then, unless scores are more than what heads output.
        """
        narrow = self.scores == "both" and 2 * self.num_directions <= self.head_dim
        return self.weights != "dual" and narrow and is_one_map(x, self.score_proj, self.out_proj)

    def _projections(self) -> list[nn.Module]:
        """Those of the tokens, in the order in which the ops take them."""
        dual = [self.h_proj] if self.weights == "dual" else []
        return [self.q_proj, self.k_proj, *dual]

    def _packed(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Outputs of packed sequences, in the shape of x."""
        tokens = self._tokens(x.reshape(1, -1, self.dim), None)
        parts = self._parts(tokens)
        if self.weights == "static" and not self.causal and not self.features.normalised:
            flat = self._project(tokens)
            run = position_wise_pass(parts, flat, sequences, grams=self.training)
        else:
            run = self._padded(parts, tokens, sequences)
        if self.training:
            lengths = sequences.lengths().to(accumulation_dtype(x.dtype))
            self._record(parts, run, lengths, lengths)
        return self._output(parts, run, tokens).view_as(x)

    def _padded(self, parts: Parts, tokens: Tokens, sequences: Sequences) -> Pass:
        """A run over packed sequences that pads what the projections give."""
        padding = sequences.padding()
        projected = padding.projected(self._project(tokens))
        if self.causal:
            state = self.init_state(sequences.number)
            run, _ = causal_pass(parts, projected, state, grams=self.training)
        else:
            if self.weights == "sampled":
                tokens = Tokens(padding.pad(tokens.x), padding.mask)
            landmarks = self._landmarks(tokens)
            run = bidirectional_pass(parts, projected, projected, landmarks, grams=self.training)
        return run._replace(out=padding.unpad(run.out))

    def _record(self, parts: Parts, run: Pass, num_queries: Tensor, num_keys: Tensor) -> None:
        """Keep what the objectives need.

        Before the output projection: a sharded layer gathers its parameters again when the gradient
        of its output arrives, and these nodes must run after that.
        """
        counts, half = (num_queries, num_keys), run.out.dtype.itemsize == 2
        self.record(
            ksvd_statistics(
                run.weights, parts.parameters, self.lambda_diag, run.sums, counts, half=half
            )
        )

    def _output(self, parts: Parts, run: Pass, tokens: Tokens) -> Tensor:
        unused = {"both": None, "e": "w_r", "r": "w_e"}[self.scores]
        out = self.with_zero_gradients(
            run.out, getattr(self, unused, None) if unused is not None else None
        )
        if self.features.has_modules:  # whose features, and so the outputs, have at least float32
            out = out.to(tokens.x.dtype)
        if parts.score_proj is not None:
            out = parts.score_proj(out)
        if isinstance(run.sums, Scored):
            merged = score_projection(self.score_proj, self.out_proj, self.num_heads)
            y = projected_rows(out.flatten(2), merged)
        else:
            y = projected(out.flatten(2), self.out_proj)
        return zero_padding(F.dropout(y, self.dropout, self.training), tokens.mask)

    def _heads(self, x: Tensor, projection: nn.Module) -> Tensor:
        return torch.unflatten(projected(x, projection), -1, (self.num_heads, -1))

    def _project(self, tokens: Tokens, *, context: bool = False) -> Projected:
        """Queries, keys and dual variables; a context needs its queries for a normaliser alone."""
        x, h = tokens.x, None
        q = self._heads(x, self.q_proj) if self.features.normalised or not context else None
        if self.weights == "dual":
            h = torch.unflatten(projected(x, self.h_proj), -1, (2, self.num_heads, -1))
        return Projected(q, self._heads(x, self.k_proj), h, tokens.mask)

    def _parts(self, tokens: Tokens) -> Parts:
        if is_plain(self.score_proj):
            maps, bias, called = (
                self._score_maps(self.score_proj.weight),
                self.score_proj.bias,
                None,
            )
        else:
            width = self.num_directions * (2 if self.scores == "both" else 1)
            scores = torch.eye(width, dtype=tokens.x.dtype, device=tokens.x.device)
            maps, bias, called = self._score_maps(scores), None, self.score_proj
        parameters = self._weight_parameters()
        return Parts(self.features, parameters, maps, bias, self.num_heads, called)

    def _weight_parameters(self) -> tuple[Tensor, Tensor] | None:
        return None if self.weights == "dual" else (self.w_e, self.w_r)

    def _landmarks(self, source: Tokens) -> Landmarks | None:
        if self.weights != "sampled":
            return None
        return choose_landmarks(
            source.x,
            self.num_landmarks,
            token_mask=source.mask,
            dropout=self.landmark_dropout if self.training else 0.0,
            jitter=self.landmark_jitter if self.training else 0.0,
        )

    def _score_maps(self, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The parts C_e, C_r [S, C] of [C, 2S] or [C, S]; None where a side is not output."""
        if self.scores == "both":
            c_e, c_r = weight.chunk(2, 1)
            return c_e.mT, c_r.mT
        return (weight.mT, None) if self.scores == "e" else (None, weight.mT)

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None,
        token_mask: Tensor | None,
        context_mask: Tensor | None,
    ) -> None:
        check_inputs(self.dim, x, context, token_mask, context_mask, causal=self.causal)
        if context is not None and self.weights == "static":
            raise ValueError(
                "a context does not go with weights='static', which never look at it; "
                "use weights='sampled' or weights='dual'"
            )

    def _check_causal(self, method: str) -> None:
        if not self.causal:
            raise ValueError(f"{method} needs a layer built with causal=True")
