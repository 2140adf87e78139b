r"""From the projections of a Primal layer to the scores of its heads, in plain PyTorch.

    e_i = W_{e|X}^T \phi_q(x_i)        r_i = W_{r|X}^T \phi_k(x_i)        (eq. 9)

Both sides are one tensor [2, H, B, N, .], queries before keys; masks are [B, N, 1].

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.base.masks import Tokens
from primal_attention.attention.primal.state import PrimalState
from primal_attention.attention.primal.statistics import Features, KernelSums, Pair
from primal_attention.feature_maps import normaliser
from primal_attention.ops.causal import Scanned, running_mean, scan, token_counts
from primal_attention.ops.landmarks import Landmarks, sampled_weights
from primal_attention.ops.primal import both_sides, moment, primal_scores, zeroed
from primal_attention.precision import accumulate, exact


class Sides(NamedTuple):
    """Queries and keys of a batch, or one of them, and the maps that make features of them."""

    z: Tensor  # [2, H, B, N, C]
    h: Tensor | None  # [2, H, B, N, S]: H_e and H_r; None unless weights are dual
    steps: Tensor | None  # [H, B, N]: how much time passes at each token; None without a decay
    maps: tuple[str, ...]
    tokens: Tokens

    @property
    def mask(self) -> Tensor | None:
        """True at real tokens, [B, N, 1]."""
        return None if self.tokens.mask is None else self.tokens.mask[:, :, None]

    def side(self, number: int) -> Sides:
        """The queries (0) or the keys (1) alone."""
        one = slice(number, number + 1)
        return self._replace(
            z=self.z[one], h=None if self.h is None else self.h[one], maps=self.maps[one]
        )

    @property
    def features(self) -> Features:
        """All that Gram matrices need."""
        return Features(self.z, self.maps, self.mask)


class Heads(NamedTuple):
    """Scores, and what the objectives need of their making."""

    scores: Tensor  # [2, H, B, N, S]
    sums: KernelSums | None  # None outside of training


class Given(NamedTuple):
    """What scores are made with beside the tokens."""

    features: FeaturePair
    parameters: Tensor | None  # w_e, w_r side by side [H, M or P, 2 S]; None for dual weights
    divided: bool  # whether the sums of dual weights are divided by the number of tokens


def sides_of(
    features: FeaturePair,
    q: Tensor,  # [B, N, H, C]
    k: Tensor,
    h: Tensor | None,  # [B, N, 2, H, S]
    steps: Tensor | None,  # [B, N, H]
    tokens: Tokens,
) -> Sides:
    """Both sides from projections."""
    h = None if h is None else h.permute(2, 3, 0, 1, 4)
    steps = None if steps is None else steps.permute(2, 0, 1)
    return Sides(both_sides(q, k), h, steps, features.names, tokens)


def bidirectional(
    given: Given,
    here: Sides,
    there: Sides,  # of the context; the same in self-attention
    landmarks: Landmarks | None,
    *,
    training: bool,
) -> Heads:
    """Queries of the tokens, keys of the source."""
    here, there = kernel_sides(given.features, here, there)
    if here.steps is not None:
        scores, _, _ = _scanned(here, None, future=True)
        return Heads(scores, _timed_sums(here, scores) if training else None)
    if given.parameters is None:
        weights = _dual_weights(here, there)
    elif landmarks is None:
        weights = _static_weights(given.parameters)
    else:
        weights = sampled_weights(landmarks, given.parameters)
    scores = primal_scores(here.z, weights, here.maps, here.mask)
    sums = _sums(here, there, scores, weights) if training else None
    if given.parameters is None and not given.divided:  # e of the keys, r of the queries
        counts = torch.stack((there.tokens.num_real(), here.tokens.num_real()))
        scores = scores * counts[:, None, :, None, None]
    return Heads(scores, sums)


def kernel_sides(features: FeaturePair, here: Sides, there: Sides) -> tuple[Sides, Sides]:
    """The sides after the maps that are modules, normalised where the map asks for it."""
    crossing = there is not here
    here = _mapped(features, here)
    there = _mapped(features, there) if crossing else here
    if not features.normalised:
        return here, there
    key_sum = zeroed(there.z[1], there.mask).sum(-2, keepdim=True)
    here = _normalised(here, key_sum)
    return here, _normalised(there, key_sum) if crossing else here


def _mapped(features: FeaturePair, sides: Sides) -> Sides:
    """The sides after the maps that are modules; a fixed map is applied where it is read."""
    if not features.has_modules:
        return sides
    queries, keys = features.queries(sides.z[0]), features.keys(sides.z[1])
    z = torch.stack((accumulate(queries.z), accumulate(keys.z)))
    return sides._replace(z=z, maps=(queries.feature_map, keys.feature_map))


def _normalised(sides: Sides, key_sum: Tensor) -> Sides:
    """Both sides over the square root of D-hat, Remark 4.1."""
    return sides._replace(z=sides.z * normaliser(sides.z[0], key_sum).rsqrt())


@exact
def _static_weights(parameters: Tensor) -> Tensor:
    """The parameters [H, P, 2 S] as the weights of all sequences, [2, H, P, S]."""
    return accumulate(torch.unflatten(parameters, -1, (2, -1))).permute(2, 0, 1, 3)


def _dual_weights(here: Sides, there: Sides) -> Tensor:
    r"""Eq. (14): $W_{e|X} = \Phi_k^\top H_r / n$ of the source, $W_{r|X} = \Phi_q^\top H_e / n$."""
    if here is there:
        return _token_mean(here).flip(0)
    return torch.cat((_token_mean(there.side(1)), _token_mean(here.side(0))))


def _token_mean(sides: Sides) -> Tensor:
    r"""$\Phi^\top H / n$ over the real tokens; zero where there are none."""
    assert sides.h is not None
    total = moment(sides.z, sides.h, sides.maps, sides.mask)
    if sides.mask is None:
        return total / sides.z.shape[-2]
    return total / sides.tokens.num_real().clamp(min=1)[:, None, None]


def _scanned(sides: Sides, before: Tensor | None, *, future: bool, grams: bool = False) -> Scanned:
    """Sums of the kernel values and dual variables of other tokens, and those after the last."""
    assert sides.h is not None
    return scan(
        sides.z,
        sides.h,
        sides.maps,
        sides.mask,
        before,
        steps=sides.steps,
        future=future,
        grams=grams,
    )


def _timed_sums(sides: Sides, scores: Tensor) -> KernelSums:
    """Sums of the scores and dual variables; the features of a kernel with a time are infinite."""
    assert sides.h is not None
    trace = (sides.h[0] * scores[0]).sum((-2, -1)).T
    return KernelSums(None, given_energies=_energies(scores), trace=trace)


def _sums(here: Sides, there: Sides, scores: Tensor, weights: Tensor) -> KernelSums:
    """Sums over the queries of here and the keys of there."""
    if there is here:
        return KernelSums(_pair(weights), (here.features,), _energies(scores))
    keys = there.side(1)
    r = primal_scores(keys.z, weights[1:], keys.maps, keys.mask)
    energies = torch.cat((_energies(scores[:1]), _energies(r)))
    return KernelSums(_pair(weights), (here.side(0).features, keys.features), energies)


def _energies(scores: Tensor) -> Tensor:
    """The sum of squares over the tokens, [sides, B, H, S]."""
    return scores.square().sum(-2).transpose(1, 2)


def _pair(weights: Tensor) -> Pair:
    """Matrices [2, H, B, ., .] or [2, H, ., .] of each side, batch first."""
    e, r = weights.transpose(1, 2) if weights.ndim == 5 else weights
    return e, r


class Past(NamedTuple):
    """Sums over the tokens up to each, or up to the last."""

    counts: Tensor  # [B, N, 1]
    total: Tensor | None  # [2, H, B, ...], after the last token
    key_sum: Tensor | None  # [H, B, N, P] for maps with a normaliser

    def state(self) -> PrimalState:
        """The state after the last token."""
        assert self.total is not None
        return PrimalState.after(self.total, self.counts[:, -1, 0], self.key_sum)


def causal_sides(
    features: FeaturePair, sides: Sides, state: PrimalState | None, *, static: bool
) -> tuple[Sides, Past]:
    """The sides as each token sees them; running means where weights are static."""
    x, mask = sides.tokens
    seen = token_counts(x, mask, None if state is None else state.num_tokens)
    past = Past(seen[:, :, None], None, None)
    if static:
        before = None if state is None else state.sums()[..., None, :]
        mean, total = running_mean(sides.z, sides.mask, past.counts, before)
        sides, past = sides._replace(z=mean), past._replace(total=total.squeeze(-2))
    sides = _mapped(features, sides)
    if not features.normalised:
        return sides, past
    key_sum = zeroed(sides.z[1], sides.mask).cumsum(-2)
    if state is not None:
        key_sum = key_sum + state.key_sum.transpose(0, 1)[..., None, :]
    return _normalised(sides, key_sum), past._replace(key_sum=key_sum)


def causal(
    given: Given, sides: Sides, state: PrimalState | None, *, training: bool
) -> tuple[Heads, PrimalState]:
    r"""The tokens that follow a state, and the state after them.

    Static weights read the running means of queries and keys. Dual weights are means over the
    tokens so far: $e_t = \frac1t \sum_{\tau \le t} h_{r,\tau} \phi_q(x_t)^\top \phi_k(x_\tau)$, and
    r with the sides exchanged; with a decay they are sums.
    """
    static = given.parameters is not None
    sides, past = causal_sides(given.features, sides, state, static=static)
    sums = None
    if given.parameters is not None:
        weights = _static_weights(given.parameters)
        scores = primal_scores(sides.z, weights, sides.maps, sides.mask)
        if training:
            sums = KernelSums(_pair(weights), (sides.features,), _energies(scores))
        return Heads(scores, sums), past.state()
    timed = sides.steps is not None
    before = None if state is None else state.sums()
    scores, total, grams = _scanned(sides, before, future=False, grams=training and not timed)
    counts = past.counts.clamp(min=1)
    if timed and training:
        sums = _timed_sums(sides, scores)
    if grams is not None:
        sums = KernelSums(_pair(total.flip(0) / counts[:, -1:]), given_grams=_pair(grams))
    scores = scores / counts if given.divided else scores
    return Heads(scores, sums), past._replace(total=total).state()
