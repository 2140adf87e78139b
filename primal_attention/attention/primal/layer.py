"""Primal-Attention as a layer.

A forward pass checks its inputs, zeroes the padding, projects the tokens to the two sides of the
kernel, takes the weights given X and the scores, records the statistics of the objectives, and
projects the scores out. Large work on a GPU does all of it in one op.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import Compaction
from primal_attention.attention.base.decoder import Decoding
from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.base.inputs import (
    Tokens,
    check_inputs,
    is_cast_alike,
    is_plain,
    zero_padding,
)
from primal_attention.attention.base.positions import (
    TimedLayer,
    check_rotary,
    rms_normed,
    rotary_positions,
    rotated,
)
from primal_attention.attention.base.shards import Sharded
from primal_attention.attention.base.validation import (
    check_choice,
    check_heads,
    check_probabilities,
    check_sizes,
)
from primal_attention.attention.primal.kernel import (
    FeaturesAndWeights,
    Past,
    PrimalState,
    causal_sides,
    features_and_weights,
    kernel_sides,
)
from primal_attention.attention.primal.packed_sequences import padding_of
from primal_attention.attention.primal.released import read_released
from primal_attention.attention.primal.statistics import KernelSums, KSVDLayer, KSVDStatistics
from primal_attention.feature_maps import FeatureMapSpec
from primal_attention.ops.causal import scan
from primal_attention.ops.landmarks import Landmarks, choose_landmarks
from primal_attention.ops.layer import LayerInputs, fused_layer
from primal_attention.ops.op import may_run_fused
from primal_attention.ops.primal import (
    Sides,
    both_sides,
    primal_scores,
    weights_given_x,
    with_features,
)
from primal_attention.precision import accumulate, accumulation_dtype, autocast_dtype


class PrimalAttention(KSVDLayer, TimedLayer, Sharded, Decoding):
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
            ``"auto"``: sampled, or where causal the form that learns best: dual with a learned
            decay, a norm, a gate and, in place of ``cosine``, the map ``unit_elu``.
        max_tokens: Upper bound of M; longer inputs are sampled.
        samples_per_direction: M is this many times ``num_directions``.
        landmark_dropout: In training, drops whole landmarks with this probability.
        landmark_jitter: In training, moves landmarks within so many landmark spacings.
        gain: The Frobenius norm that each head's w_e and w_r start with (1 as released; the root of
            ``num_directions`` makes the directions unit vectors, on average). Not of dual weights.
        feature_map: ``cosine``, ``exponential``, ``elu``, ``unit_elu``, ``relu``, ``identity``, a
            :class:`~primal_attention.feature_maps.FeatureMap`, or a pair (queries, keys) of these.
        causal: Each token sees itself and those before it. With static weights q and k become
            running means; dual weights are means up to the token; sampled weights cannot be causal.
        scores: What is output, ``both``, ``e`` or ``r``; the objectives always use both.
        decay: Weigh the kernel of dual weights by $e^{-|a_i - a_j|}$, the Ornstein-Uhlenbeck kernel
            of a time a: ``"fixed"``, at each token a step that the head learns, or ``"learned"``,
            one that is projected from the token. The sums are then divided by nothing.
        score_norm: Divide the scores of each head by their root mean square, with a learned gain,
            in place of the division of dual weights by the number of tokens.
        gate: Multiply the outputs of the heads by the silu of a projection of the token.
        rotary: Turn queries and keys by their positions among the real tokens before the map.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Chen et al., 2023",
        "N",
        causal=True,
        causal_forms=({"weights": "static"}, {"weights": "dual"}),  # the default weights have none
        causal_patch={"weights": "auto"},
        cross=True,
        decode="two sums of constant size",
        sums_over_queries=lambda layer: layer.weights == "dual",
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
        decay: str | None = None,
        score_norm: bool = False,
        gate: bool = False,
        rotary: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        head_dim = check_heads(dim, num_heads)
        check_sizes(
            num_directions=num_directions,
            samples_per_direction=samples_per_direction,
            max_tokens=max_tokens,
        )
        if weights == "auto":
            weights = "dual" if causal else "sampled"
            if causal:
                decay, score_norm, gate = decay or "learned", True, True
                feature_map = "unit_elu" if feature_map == "cosine" else feature_map
        _check_weights(weights, decay, causal=causal, gain=gain, landmark_jitter=landmark_jitter)
        check_choice("scores", scores, ("both", "e", "r"))
        check_probabilities(landmark_dropout=landmark_dropout, dropout=dropout)
        super().__init__(num_heads, num_directions)
        self.dim, self.head_dim = dim, head_dim
        self.weights, self.causal, self.scores = weights, causal, scores
        self.landmark_dropout, self.landmark_jitter = landmark_dropout, landmark_jitter
        self.gain, self.dropout = gain, dropout
        self.score_norm, self.gate, self.rotary = score_norm, gate, rotary
        self.features = FeaturePair(feature_map, head_dim)
        if rotary:
            check_rotary(head_dim)
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
        if score_norm:
            self.score_gain = nn.Parameter(torch.empty(sides * num_directions))
        self.score_proj = nn.Linear(sides * num_directions, head_dim, bias=bias)
        self.add_time(decay, dim, num_heads, normalised=self.features.normalised)
        if gate:
            self.gate_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w_e, w_r (orthogonal over the heads, as released) and Lambda, uniform in (0, 1).

        A gain starts at 1, the shares that heads with a fixed decay keep between 0.88 and 0.998.
        """
        if self.weights != "dual":
            nn.init.orthogonal_(self.w_e, self.gain)
            nn.init.orthogonal_(self.w_r, self.gain)
        if self.score_norm:
            nn.init.ones_(self.score_gain)
        self.reset_time()
        self.reset_lambda()

    @classmethod
    def from_released(
        cls, state_dict: Mapping[str, Tensor], *, dropout: float = 0.0
    ) -> PrimalAttention:
        """Build a layer with the parameters of one trained with the authors' released code.

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
        [1, T, D] holds B sequences one after the other, and so do the outputs. ``max_seqlen`` is an
        upper bound of their lengths; without it a GPU synchronises, which neither
        ``torch.compile`` nor a CUDA graph allows.
        """
        if cu_seqlens is not None:
            _check_alone(context=context, token_mask=token_mask, context_mask=context_mask)
            self.check_whole("cu_seqlens")
            padding = padding_of(x, cu_seqlens, max_seqlen, self.dim)
            tokens = self._tokens(x.reshape(1, -1, self.dim), None)
            here = self._sides(tokens, padding)
            return self._output(self._attend(here, here)[0], tokens, padding).view_as(x)
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} was given without cu_seqlens")
        check_inputs(self.dim, x, context, token_mask, context_mask, causal=self.causal)
        tokens = self._tokens(x, token_mask)
        if context is None:
            whole = self.shard is None
            y = self._fused(tokens) if whole and may_run_fused("layer", tokens.x) else None
            if y is not None:
                return self._finished(y, tokens)
            here = there = self._sides(tokens)
        else:
            self._check_context()
            here, there = self._sides(tokens), self._sides(self._tokens(context, context_mask))
        scores, _ = self._attend(here, there)
        return self._output(scores, tokens)

    def _tokens(self, x: Tensor, mask: Tensor | None) -> Tokens:
        """Zero the padding, and cast for autocast, once: all plain projections read this copy."""
        dtype = autocast_dtype(x)
        if dtype != x.dtype and all(map(is_plain, self._projections())):
            x = x.to(dtype)
        mask = None if mask is None else mask.contiguous()  # torch.where may copy its layout
        return Tokens(zero_padding(x, mask), mask)

    def _sides(
        self, tokens: Tokens, padding: Compaction | None = None, before: Tensor | None = None
    ) -> tuple[Sides, Tokens]:
        """Queries, keys, dual variables and time, and their tokens; of packed ones, padded.

        The tokens come after so many others, [B].
        """
        x, H = tokens.x, self.num_heads
        q = torch.unflatten(self.q_proj(x), -1, (H, -1))
        k = torch.unflatten(self.k_proj(x), -1, (H, -1))
        h = None
        if self.weights == "dual":
            h = torch.unflatten(self.h_proj(x), -1, (2, H, -1))
        steps = None if self.decay is None else self.time_steps(*tokens)
        if padding is not None:
            q, k = padding.pack(q), padding.pack(k)
            h, steps = (None if each is None else padding.pack(each) for each in (h, steps))
            x = padding.pack(x) if self.weights == "sampled" else q.flatten(-2)
            tokens = Tokens(x, padding.real())
        if self.rotary:
            before = before if self.shard is None else self.shard.num_before(tokens)
            positions = rotary_positions(*tokens, before)
            q, k = rotated(q, positions), rotated(k, positions)
        h = None if h is None else h.permute(2, 3, 0, 1, 4)
        steps = None if steps is None else steps.permute(2, 0, 1)
        mask = None if tokens.mask is None else tokens.mask[:, :, None]
        return Sides(both_sides(q, k), h, steps, self.features.names, mask), tokens

    def _attend(
        self,
        of_tokens: tuple[Sides, Tokens],
        of_source: tuple[Sides, Tokens],
        state: PrimalState | None = None,
    ) -> tuple[Tensor, Past | None]:
        """Scores [2, H, B, N, S], and what has passed where causal.

        A training pass keeps what the objectives need, before the output projection: a sharded
        layer gathers its parameters again when the gradient of its output arrives, and these nodes
        must run after that. Tokens that follow a state are no training pass.
        """
        (here, tokens), (there, source) = of_tokens, of_source
        keep, past, landmarks = self.training and state is None, None, None
        dual, shard = self.weights == "dual", self.shard
        if self.causal:
            state = state if shard is None else shard.state(self, here)
            here, past = causal_sides(self.features, here, state, static=not dual)
            there = here
        elif self.features.has_modules:
            here, there = kernel_sides(self.features, here, there, shard)
        if dual and here.steps is None:
            alone = there is here
            here = with_features(here)
            there = here if alone else with_features(there)
        if dual and (past is not None or here.steps is not None):
            scores, sums, past = self._scanned(here, past, state, keep=keep)
        else:
            parameters = None if dual else torch.cat((self.w_e, self.w_r), -1)
            landmarks = self._landmarks(source)
            weights = weights_given_x(parameters, here, there, landmarks)
            if dual and (self.score_norm or shard is not None):
                counts = torch.stack((there.num_tokens(), here.num_tokens()))
                if shard is not None:
                    weights, counts = shard.mean(weights, counts)
            scores = primal_scores(here.z, weights, here.maps, here.mask)
            sums = KernelSums.of(here, there, scores, weights) if keep else None
            if dual and self.score_norm:  # e is a sum over the keys, r over the queries
                scores = scores * counts[:, None, :, None, None]
        if sums is not None:
            trace = None  # of dual weights: that of the weights given X
            if not dual:
                trace = (accumulate(self.w_e) * accumulate(self.w_r)).sum((-2, -1))
            self._record(sums, landmarks, tokens, source, trace, self.lambda_diag)
        return scores, past

    def _scanned(
        self, here: Sides, past: Past | None, state: PrimalState | None, *, keep: bool
    ) -> tuple[Tensor, KernelSums | None, Past | None]:
        r"""Sums $e_i = \sum_j \kappa(x_i, x_j) h_r(x_j)$ and r; causal means without a decay."""
        z, h, steps, maps, mask = here
        assert h is not None
        before, later = None if state is None else state.sums(), None
        if past is None and self.shard is not None:
            before, later = self.shard.around(here)
        scores, total = scan(z, h, maps, mask, before, steps=steps, future=past is None)
        scores = scores if later is None else scores + later
        sums = KernelSums.of_scores(scores, h) if keep and steps is not None else None
        if past is None:
            return scores, sums, None
        counts = past.counts.clamp(min=1)
        if keep and steps is None:  # of the weights behind the last token
            weights = total.flip(0) / counts[:, -1:]
            weights = weights if self.shard is None else self.shard.of_last(weights)
            sums = KernelSums.of(here, here, primal_scores(z, weights, maps, mask), weights)
        if steps is None and not self.score_norm:
            scores = scores / counts
        return scores, sums, past._replace(total=total)

    def _landmarks(self, source: Tokens) -> Landmarks | None:
        if self.weights != "sampled":
            return None
        dropout, jitter = self.landmark_dropout, self.landmark_jitter
        dropout, jitter = (dropout, jitter) if self.training else (0.0, 0.0)
        if self.shard is not None:
            landmarks: Landmarks = self.shard.landmarks(source, self.num_landmarks, dropout, jitter)
            return landmarks
        return choose_landmarks(
            source.x, self.num_landmarks, token_mask=source.mask, dropout=dropout, jitter=jitter
        )

    def _record(
        self,
        sums: KernelSums,
        landmarks: Landmarks | None,
        tokens: Tokens,
        source: Tokens,
        trace: Tensor | None,
        lambda_diag: Tensor,
    ) -> None:
        """Keep the statistics of a training pass."""
        alone, num_queries = source is tokens, tokens.num_real()
        num_keys = num_queries if alone else source.num_real()
        if self.shard is not None:
            sums, num_queries, num_keys = self.shard.totals(sums, num_queries, num_keys)
            alone = False
        statistics = KSVDStatistics(
            sums,
            landmarks,
            trace,
            lambda_diag,
            num_queries,
            num_keys,
            averaged=self.weights == "dual" and self.decay is None,
            with_gradients=torch.is_grad_enabled(),
            half=tokens.x.dtype.itemsize == 2,
            num_tokens=tokens.x.shape[1] if alone and tokens.mask is None else None,
        )
        self.record(statistics)

    def _output(self, scores: Tensor, tokens: Tokens, padding: Compaction | None = None) -> Tensor:
        """Map the scores that are output to the heads, and these to the outputs."""
        scores = scores if self.scores == "both" else self._chosen(scores)
        rows = scores.permute(2, 3, 1, 0, 4).flatten(-2)  # [B, N, H, 2 S]
        rows = rms_normed(rows, self.score_gain) if self.score_norm else rows
        rows = rows.to(tokens.x.dtype)
        rows = rows if padding is None else padding.unpack(rows)
        unused = {"both": None, "e": "w_r", "r": "w_e"}[self.scores]
        heads_out = self.with_zero_gradients(
            self.score_proj(rows), None if unused is None else getattr(self, unused, None)
        )
        return self._finished(self._projected_out(heads_out.flatten(-2), tokens), tokens)

    def _chosen(self, scores: Tensor) -> Tensor:
        """Select the sides that are output."""
        return scores[{"both": slice(2), "e": slice(1), "r": slice(1, 2)}[self.scores]]

    def _projected_out(self, heads_out: Tensor, tokens: Tokens) -> Tensor:
        """The outputs of the heads [B, N, H C], gated where there is a gate, and projected."""
        y = heads_out * F.silu(self.gate_proj(tokens.x)) if self.gate else heads_out
        projected: Tensor = self.out_proj(y)
        return projected

    def _finished(self, y: Tensor, tokens: Tokens) -> Tensor:
        """The outputs with dropout, zero at padded tokens."""
        return zero_padding(F.dropout(y, self.dropout, self.training), tokens.mask)

    def _fused(self, tokens: Tokens) -> Tensor | None:
        """Outputs before dropout by one fused node; None where none takes the layer."""
        projections = [*self._projections()[: 3 if self.weights == "dual" else 2], self.score_proj]
        if (
            any((self.decay, self.score_norm, self.rotary, self.features.has_modules))
            or not all(map(is_plain, projections))
            or len({each.bias is None for each in projections[:-1]}) > 1
            or not is_cast_alike(tokens.x, projections)
        ):
            return None
        dual, landmarks = self.weights == "dual", self._landmarks(tokens)
        h_proj = self.h_proj if dual else None
        whole = not self.gate and is_plain(self.out_proj)
        out_proj = self.out_proj if whole else None
        _, positions, scale = landmarks or (None, None, 1.0)
        result = fused_layer(
            LayerInputs(
                tokens.x,
                self.q_proj.weight,
                self.k_proj.weight,
                None if h_proj is None else h_proj.weight,
                self.q_proj.bias,
                self.k_proj.bias,
                None if h_proj is None else h_proj.bias,
                w_e=None if dual else self.w_e,
                w_r=None if dual else self.w_r,
                score_weight=self.score_proj.weight,
                score_bias=self.score_proj.bias,
                out_weight=None if out_proj is None else out_proj.weight,
                out_bias=None if out_proj is None else out_proj.bias,
                raw_lambda=self.raw_lambda if self.training else None,
                positions=positions,
                scale=scale,
                num_heads=self.num_heads,
                causal=self.causal,
                token_mask=tokens.mask,
                scores=self.scores,
                map_q=self.features.names[0],
                map_k=self.features.names[1],
                grams=self.training,
            )
        )
        if result is None:
            return None
        if self.training:
            weights = result.w_e_given_x, result.w_r_given_x
            sums = KernelSums(weights, given_grams=(result.gram_q, result.gram_k))
            trace = result.trace if self.weights == "sampled" else None
            self._record(sums, landmarks, tokens, tokens, trace, result.lambda_diag)
        return result.out if whole else self._projected_out(result.out.flatten(-2), tokens)

    def init_state(self, batch_size: int) -> PrimalState:
        """Return the state before the first token of ``batch_size`` sequences."""
        H, P = self.num_heads, self.features.feature_dim
        shape = (self.head_dim,) if self.weights == "static" else (P, self.num_directions)
        q_side, k_side = (
            self._zeros(batch_size, H, *shape) for _ in "qk"
        )  # compilers guard on aliases
        key_sum = self._zeros(batch_size, H, P if self.features.normalised else 0)
        return PrimalState(q_side, k_side, self._zeros(batch_size), key_sum)

    def _continued(
        self, x: Tensor, token_mask: Tensor | None, state: PrimalState
    ) -> tuple[Tensor, PrimalState]:
        self.check_whole("prefill")
        w_e = self._parameters.get("w_e")
        if w_e is not None and w_e.is_meta and not x.is_meta:
            raise RuntimeError(
                "prefill and step need w_e and w_r, which are offloaded and loaded by layer(x) "
                "alone; keep them on a device, or generate without a cache (use_cache=False)"
            )
        tokens = self._tokens(x, token_mask)
        here = self._sides(tokens, before=state.num_tokens)
        scores, past = self._attend(here, here, state)
        assert past is not None
        return self._output(scores, tokens), past.state()

    def fold(self) -> PrimalAttention:
        """Return a copy for inference, with all that follows its static features in one matrix."""
        from primal_attention.attention.primal.fold import folded  # a subclass of this one

        return folded(self)

    def features_and_weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> FeaturesAndWeights:
        """Return the kernel of an evaluation pass: features, weights and dual variables.

        The features of a causal layer with static weights are those of its running means; dual
        weights are means over all tokens. What follows the projections is computed in ``dtype``,
        in at least float32 by default.
        """
        self.check_whole("features_and_weights")
        check_inputs(self.dim, x, context, token_mask, context_mask, causal=self.causal)
        tokens = self._tokens(x, token_mask)
        here, source = self._sides(tokens)[0], tokens
        there = here
        if context is not None:
            self._check_context()
            source = self._tokens(context, context_mask)
            there = self._sides(source)[0]
        rows = None
        if self.weights == "sampled":
            rows = choose_landmarks(source.x, self.num_landmarks, token_mask=source.mask).rows()
        dtype = dtype or accumulation_dtype(x.dtype)
        return features_and_weights(self, here, there, rows, dtype)

    def extra_repr(self) -> str:
        """Return the sizes and choices, for printing."""
        return (
            f"{self.dim}, {self.num_heads}, {self.num_directions}, weights={self.weights!r}, "
            f"causal={self.causal}, scores={self.scores!r}, decay={self.decay!r}, "
            f"score_norm={self.score_norm}, gate={self.gate}, rotary={self.rotary}"
        )

    def _projections(self) -> list[nn.Module]:
        """The projections of the tokens."""
        dual = [self.h_proj] if self.weights == "dual" else []
        gate = [self.gate_proj] if self.gate else []
        return [self.q_proj, self.k_proj, *dual, *gate]

    def _check_context(self) -> None:
        if self.weights == "static":
            raise ValueError(
                "a context does not go with weights='static', which never look at it; "
                "use weights='sampled' or weights='dual'"
            )
        self.check_no_context()


def _check_weights(
    weights: str, decay: str | None, *, causal: bool, gain: float, landmark_jitter: float
) -> None:
    """Raise unless a layer can have such weights."""
    check_choice("weights", weights, ("static", "sampled", "dual", "auto"))
    if not 0 <= landmark_jitter < math.inf:
        raise ValueError(f"landmark_jitter must be finite and not negative, got {landmark_jitter}")
    if not 0 < gain < math.inf or (gain != 1 and weights == "dual"):
        raise ValueError(
            f"gain must be positive and finite, and 1 with weights='dual', which have no w_e "
            f"and w_r; got {gain} and weights={weights!r}"
        )
    if causal and weights == "sampled":
        raise ValueError(
            "causal=True does not go with weights='sampled': landmarks show every token the "
            "future; use weights='auto', weights='static' or weights='dual'"
        )
    if decay is not None and weights != "dual":
        raise ValueError(
            f"decay={decay!r} needs weights='dual': it is a weight on pairs of tokens, which "
            f"weights={weights!r} do not have"
        )


def _check_alone(**others: Tensor | None) -> None:
    """Raise where a mask or a context is given along with packed sequences."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} {list(value.shape)} does not go with cu_seqlens: packed sequences have no "
                f"padding and no context; pad them and use masks instead"
            )
