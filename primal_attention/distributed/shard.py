r"""One process's shard of the tokens of every sequence, and what it asks of the other shards.

All that tokens of other shards do to an output is in sums whose size does not depend on the number
of tokens: counts, $\sum z$, $\Phi^\top H$, landmarks, Gram matrices. Causal forms need the sums of
earlier shards, which are a state to go on from; with a decay

    state before shard c = \sum_{b < c} e^{-(time of the shards between)} (sums at the end of b)

Letters: B batch, N tokens of the shard, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.attention.base.inputs import Tokens
from primal_attention.attention.primal.kernel import PrimalState, causal_sides
from primal_attention.attention.primal.statistics import KernelSums
from primal_attention.distributed import collectives
from primal_attention.distributed.collectives import Group
from primal_attention.ops.landmarks.eager import Landmarks, landmark_numbers, real_token_at
from primal_attention.ops.primal import Sides, moment, primal_scores, zeroed
from primal_attention.precision import accumulate

if TYPE_CHECKING:
    from primal_attention.attention.primal.layer import PrimalAttention


class ContextShard:
    """The shard of a process; shards may have different numbers of tokens."""

    def __init__(self, group: Group):
        self.group = group

    @property
    def size(self) -> int:
        """Number of shards."""
        return self.group.size

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Add each tensor up over the shards, in one message."""
        return _apart(collectives.total(_together(tensors), self.group), tensors)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Collect each tensor of all shards, [shards, ...], in one message."""
        return _apart(collectives.gathered(_together(tensors), self.group), tensors)

    def before(self, tensor: Tensor) -> Tensor:
        """Add up the tensors of the earlier shards."""
        return self.gather(tensor)[0][: self.group.rank].sum(0)

    def of_last(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the last shard."""
        last = self.group.rank == self.size - 1
        return self.sum(tensor if last else tensor * 0.0)[0]  # in the graph of every shard

    def num_before(self, tokens: Tokens) -> Tensor:
        """Count the real tokens of earlier shards, [B], int64."""
        return self.before(_num_real(tokens))

    def mean(self, weights: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Average means [2, H, B, P, S] over counts [2, B] of tokens; return the counts too."""
        sums, counts = self.sum(weights * counts[:, None, :, None, None], counts)
        return sums / counts.clamp(min=1)[:, None, :, None, None], counts

    def landmarks(
        self, source: Tokens, num_landmarks: int, dropout: float, jitter: float
    ) -> Landmarks:
        """Choose the landmarks of whole sequences and gather their rows [B, M, D]."""
        x, num_real = source.x, _num_real(source)
        (counts,) = self.gather(num_real)
        shape = x.shape[0], num_landmarks
        moves, drops = (
            collectives.from_first(torch.rand(shape, device=x.device), self.group)
            if wanted
            else None
            for wanted in (jitter > 0, dropout > 0)
        )
        numbers = landmark_numbers(counts.sum(0)[:, None], num_landmarks, moves, jitter, x.device)
        numbers = numbers - counts[: self.group.rank].sum(0)[:, None]
        own = (numbers >= 0) & (numbers < num_real[:, None])
        own = own if drops is None else own & (drops >= dropout)
        mask = torch.ones_like(x[..., 0], dtype=torch.bool) if source.mask is None else source.mask
        places = torch.where(own, real_token_at(mask, numbers.clamp(0, x.shape[1] - 1)), -1)
        (rows,) = self.sum(Landmarks(x, places, 1.0 / (1.0 - dropout)).rows())
        order = torch.arange(num_landmarks, device=x.device)
        return Landmarks(rows, order.expand(x.shape[0], -1))

    def state(self, layer: PrimalAttention, here: Sides) -> PrimalState:
        """Return the state of a causal layer after the earlier shards."""
        features, static = layer.features, layer.weights == "static"
        count = here.num_tokens().long()
        state = layer.init_state(len(count))._replace(num_tokens=self.before(count))
        if static:
            state = _with_sums(state, self.before(zeroed(accumulate(here.z), here.mask).sum(-2)))
        if features.normalised:
            key_sum = causal_sides(features, here, state, static=static)[1].key_sum
            assert key_sum is not None
            state = state._replace(key_sum=self.before(key_sum[..., -1, :]).transpose(0, 1))
        if not static:
            here, _ = causal_sides(features, here, state, static=False)
            state = _with_sums(state, self._earlier(here))
        return state

    def around(self, here: Sides) -> tuple[Tensor, Tensor]:
        """Return the sums of earlier shards, and the reads [2, H, B, N, S] of later ones."""
        assert here.steps is not None
        since, until = _times(here.steps)
        span = here.steps.sum(-1)
        ends, starts, spans = self.gather(_stored(here, until), _stored(here, since), span)
        rank = self.group.rank
        before = _decayed(ends[:rank].flip(0), spans[:rank].flip(0))
        behind = _decayed(starts[rank + 1 :], spans[rank + 1 :])
        reads = primal_scores(here.z, behind.flip(0), here.maps, here.mask)
        return before, reads * (-until).exp()[..., None]

    def totals(
        self, sums: KernelSums, num_queries: Tensor, num_keys: Tensor
    ) -> tuple[KernelSums, Tensor, Tensor]:
        """Add up what the objectives need in one message; Gram matrices follow on access."""
        energies, trace = sums.given_energies, sums.trace
        assert energies is not None
        given = [energies, num_queries, num_keys, *([] if trace is None else [trace])]
        energies, num_queries, num_keys, *rest = self.sum(*given)
        sums = sums._replace(given_energies=energies, trace=rest[0] if rest else None, shard=self)
        return sums, num_queries, num_keys

    def _earlier(self, here: Sides) -> Tensor:
        """Sums [2, H, B, P, S] of dual weights over the tokens of earlier shards."""
        if here.steps is None:
            return self.before(_stored(here, None))
        until, span = _times(here.steps)[1], here.steps.sum(-1)
        ends, spans = (
            each[: self.group.rank].flip(0) for each in self.gather(_stored(here, until), span)
        )
        return _decayed(ends, spans)


def _num_real(tokens: Tokens) -> Tensor:
    x, mask = tokens
    if mask is None:
        return torch.full(x.shape[:1], x.shape[1], device=x.device)
    return mask.sum(1)


def _times(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Times from the begin of the shard to each token, and from each token to the end."""
    later = F.pad(steps[..., 1:], (0, 1))
    return steps.cumsum(-1), later.flip(-1).cumsum(-1).flip(-1)


def _stored(sides: Sides, times: Tensor | None) -> Tensor:
    """Sums of phi_q h_e^T and phi_k h_r^T, each decayed over a time."""
    assert sides.h is not None
    h = sides.h if times is None else accumulate(sides.h) * (-times).exp()[..., None]
    return moment(sides.z, h, sides.maps, sides.mask)


def _decayed(sums: Tensor, spans: Tensor) -> Tensor:
    """Add up sums of shards, the nearest first, each decayed over the spans of nearer shards."""
    between = torch.cat((torch.zeros_like(spans[:1]), spans[:-1])).cumsum(0)
    return (sums * (-between).exp()[:, None, ..., None, None]).sum(0)


def _with_sums(state: PrimalState, sums: Tensor) -> PrimalState:
    q_side, k_side = sums.transpose(1, 2)
    return state._replace(q_side=q_side, k_side=k_side)


def _together(tensors: tuple[Tensor, ...]) -> Tensor:
    """Put tensors into one; a single one stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat([each.flatten() for each in tensors])


def _apart(flat: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Undo :func:`_together`; leading axes of the message stay."""
    if len(tensors) == 1:
        return [flat]
    pieces = torch.split(flat, [each.numel() for each in tensors], -1)
    return [
        piece.reshape(*flat.shape[:-1], *each.shape).to(each.dtype)
        for piece, each in zip(pieces, tensors, strict=True)
    ]
