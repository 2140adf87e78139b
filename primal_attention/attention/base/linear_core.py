r"""Attention whose weights are products of features, in linear time.

$y_i = \frac{\sum_j \phi_q(i)^\top \phi_k(j)\, v_j}{\sum_j \phi_q(i)^\top \phi_k(j)}
     = \frac{\phi_q(i)^\top S}{\phi_q(i)^\top z}$ with the moments $S = \sum_j \phi_k(j) v_j^\top$
and $z = \sum_j \phi_k(j)$. Both come from one pass: the values get a channel that is 1.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, P feature dim, V channels.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.features import FeatureSide
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.causal import scan
from primal_attention.ops.primal import both_sides, moment
from primal_attention.precision import accumulate, exact


class LinearState(NamedTuple):
    """S and z over the tokens so far, in at least float32."""

    kv: Tensor  # [B, H, P, C]
    k_sum: Tensor  # [B, H, P]


class MomentsAttention(DecodingAttention):
    """A mechanism whose decode state is :class:`LinearState`."""

    least: ClassVar[float | None] = None  # of the normaliser; None: 0 where it has no digits

    @property
    @abstractmethod
    def num_features(self) -> int:
        """P."""

    def init_state(self, batch_size: int) -> Any:
        """Return the moments before the first token: zeros."""
        kv = self._zeros(batch_size, self.num_heads, self.num_features, self.head_dim)
        return LinearState(kv, kv[..., 0])


def attend_moments(
    queries: FeatureSide,
    keys: FeatureSide,
    v: Tensor,
    source_mask: Tensor | None,
    *,
    least: float | None = None,
) -> Tensor:
    """Attend from queries [B, N, H, .] to all real tokens of keys [B, T, H, .]: [B, N, H, C].

    The normaliser is at least ``least``; with None, an output is 0 where it has no digits.
    """
    read = read_moment(key_moment(keys, _with_ones(v), source_mask), queries)
    return _normalised(read, least).to(v.dtype)


def scan_moments(
    queries: FeatureSide,  # [B, N, H, .]
    keys: FeatureSide,
    v: Tensor,  # [B, N, H, C]
    before: LinearState | None,
    mask: Tensor | None,  # [B, N], True = real token
    steps: Tensor | None = None,  # [B, N, H]: how much time passes at each token
    *,
    causal: bool = True,
    least: float | None = None,
) -> tuple[Tensor, LinearState]:
    """Scan outputs [B, N, H, C] and the moments after the last; both ways if not causal."""
    state = None if before is None else torch.cat([before.kv, before.k_sum[..., None]], dim=-1)
    read, state = scan_moment(queries, keys, _with_ones(v), state, mask, steps, future=not causal)
    return _normalised(read, least).to(v.dtype), LinearState(state[..., :-1], state[..., -1])


def key_moment(keys: FeatureSide, values: Tensor, mask: Tensor | None) -> Tensor:
    r"""$\sum_j \phi_k(j) v_j^\top$ [B, H, P, V] over the real tokens of [B, T, H, .]."""
    z, values = _heads_first(keys.z), _heads_first(values)
    return moment(z, values, (keys.feature_map,), _of_rows(mask)).transpose(0, 1)


@exact
def read_moment(total: Tensor, queries: FeatureSide) -> Tensor:
    r"""$\phi_q(i)^\top S$ [B, N, H, V] of queries [B, N, H, .] and S [B, H, P, V]."""
    phi = FIXED_MAPS[queries.feature_map](accumulate(queries.z.transpose(1, 2)))
    return (phi @ total).transpose(1, 2)


def scan_moment(
    queries: FeatureSide,
    keys: FeatureSide,
    values: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    steps: Tensor | None = None,
    *,
    future: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""$\phi_q(t)^\top S_t$ [B, N, H, V] with the moment up to each token, and the last moment."""
    read, after = scan(
        both_sides(queries.z, keys.z),
        _heads_first(values)[None],
        (queries.feature_map, keys.feature_map),
        _of_rows(mask),
        None if state is None else state.transpose(0, 1)[None],
        steps=None if steps is None else steps.permute(2, 0, 1),
        future=future,
    )
    return read[0].permute(1, 2, 0, 3), after[0].transpose(0, 1)


def _heads_first(z: Tensor) -> Tensor:
    """The tokens [B, N, H, C] as [H, B, N, C]."""
    return z.permute(2, 0, 1, 3)


def _of_rows(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, :, None]


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


@exact
def _normalised(read: Tensor, least: float | None) -> Tensor:
    normaliser = read[..., -1:]
    if least is not None:
        return read[..., :-1] / normaliser.clamp(min=least)
    info = torch.finfo(read.dtype)
    lost = normaliser.abs() < info.tiny / info.eps
    return torch.where(lost, 0.0, read[..., :-1] / torch.where(lost, 1.0, normaliser))
