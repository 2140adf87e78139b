"""The kernel as the tokens of a batch see it: its two sides, their memory, weights given X.

Letters: B batch, N tokens, T tokens of the context, H heads, C head dim, P feature dim,
S directions, M landmarks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.features import FeaturePair
from primal_attention.feature_maps import normaliser
from primal_attention.ops.causal import running_mean, token_counts
from primal_attention.ops.primal import Sides, zeroed
from primal_attention.ops.primal import features as fixed_features
from primal_attention.precision import accumulate

if TYPE_CHECKING:
    from primal_attention.attention.primal.layer import PrimalAttention


class FeaturesAndWeights(NamedTuple):
    r"""The kernel of a layer on a batch; features and dual variables are zero at padding.

    The kernel is that of Theorem 3.2, $K = \Phi_q F_X^\top F_X \Phi_k^\top$; with ``times`` its
    entries are multiplied by $e^{-|a_i - a_j|}$. Without a context T is N.
    """

    phi_q: Tensor  # [B, H, N, P]
    phi_k: Tensor  # [B, H, T, P], of the context
    phi_k_at_x: Tensor  # [B, H, N, P], of which the r-scores are made; phi_k without a context
    x_sampled: Tensor | None  # F_X [B, H, M, P]; None where it is the identity
    w_e: Tensor  # [H, M, S], [H, P, S] where F_X is the identity, [B, H, P, S] of dual weights
    w_r: Tensor
    h: tuple[Tensor, Tensor] | None  # H_e [B, H, N, S], H_r [B, H, T, S] of dual weights
    lambda_diag: Tensor  # [H, S]
    times: Tensor | None  # a [B, H, N]; None without a decay
    token_mask: Tensor | None  # [B, N], True at real tokens
    context_mask: Tensor | None  # [B, T]; token_mask without a context

    @property
    def w_e_given_x(self) -> Tensor:
        """W_{e|X} = F_X^T w_e, [B, H, P, S], or [H, P, S] for all sequences."""
        return self.w_e if self.x_sampled is None else self.x_sampled.mT @ self.w_e

    @property
    def w_r_given_x(self) -> Tensor:
        """W_{r|X} = F_X^T w_r, likewise."""
        return self.w_r if self.x_sampled is None else self.x_sampled.mT @ self.w_r


def features_and_weights(
    layer: PrimalAttention, here: Sides, there: Sides, rows: Tensor | None, dtype: torch.dtype
) -> FeaturesAndWeights:
    """Return the kernel between projected tokens, there of the context if there is one.

    The rows are the landmarks [B, M, D] of sampled weights.
    """
    crossing, features = there is not here, layer.features
    here = _in_dtype(here, features, dtype)
    there = _in_dtype(there, features, dtype) if crossing else here
    if layer.causal:
        here, _ = causal_sides(features, here, None, static=layer.weights == "static")
        there = here
    else:
        here, there = kernel_sides(features, here, there)
    phi_q, phi_k_at_x = _features(here, dtype)
    phi_k = _features(there.side(1), dtype)[0] if crossing else phi_k_at_x
    h = x_sampled = None
    if layer.weights == "dual":
        h_e, h_r = h = _dual_variables(here, 0, dtype), _dual_variables(there, 1, dtype)
        num_queries, num_keys = (
            each.num_tokens().clamp(min=1)[:, None, None, None].to(dtype) for each in (here, there)
        )
        w_e, w_r = phi_k.mT @ h_r / num_keys, phi_q.mT @ h_e / num_queries
    else:
        w_e, w_r = layer.w_e.to(dtype), layer.w_r.to(dtype)
    if rows is not None:
        rows = torch.unflatten(rows.to(dtype), -1, (layer.num_heads, -1))
        x_sampled = rows.transpose(1, 2)
    return FeaturesAndWeights(
        phi_q,
        phi_k,
        phi_k_at_x,
        x_sampled,
        w_e,
        w_r,
        h,
        layer.lambda_diag.to(dtype),
        None if here.steps is None else here.steps.to(dtype).cumsum(-1).transpose(0, 1),
        _mask(here),
        _mask(there),
    )


def _in_dtype(sides: Sides, features: FeaturePair, dtype: torch.dtype) -> Sides:
    """Widen queries and keys; modules get them in the dtype of their parameters."""
    return sides if features.has_modules else sides._replace(z=sides.z.to(dtype))


def _features(sides: Sides, dtype: torch.dtype) -> Tensor:
    """Return the features [sides, B, H, N, P]."""
    return fixed_features(sides.z, sides.maps, sides.mask).transpose(1, 2).to(dtype)


def _dual_variables(sides: Sides, side: int, dtype: torch.dtype) -> Tensor:
    assert sides.h is not None
    return zeroed(sides.h[side], sides.mask).transpose(0, 1).to(dtype)


def _mask(sides: Sides) -> Tensor | None:
    return None if sides.mask is None else sides.mask[:, :, 0]


class PrimalState(NamedTuple):
    """Sums over the real tokens so far, batch first, in at least float32."""

    q_side: Tensor  # static: sum of q [B, H, C]; dual: sum of phi_q h_e^T [B, H, P, S]
    k_side: Tensor  # static: sum of k [B, H, C]; dual: sum of phi_k h_r^T [B, H, P, S]
    num_tokens: Tensor  # [B]
    key_sum: Tensor  # sum of phi_k [B, H, P] for maps with a normaliser, else [B, H, 0]

    def sums(self) -> Tensor:
        """Return both sums, heads first, [2, H, B, ...]."""
        return torch.stack((self.q_side, self.k_side)).transpose(1, 2)


class Past(NamedTuple):
    """Sums over the tokens up to each, or up to the last."""

    counts: Tensor  # [B, N, 1]
    total: Tensor | None  # [2, H, B, ...], after the last token
    key_sum: Tensor | None  # [H, B, N, P] for maps with a normaliser

    def state(self) -> PrimalState:
        """Return the state after the last token, which shares no memory with longer tensors."""
        assert self.total is not None
        q_side, k_side = (side.contiguous() for side in self.total.transpose(1, 2))
        if self.key_sum is None:
            key_sum = q_side.new_zeros(*q_side.shape[:2], 0)
        else:
            key_sum = self.key_sum[..., -1, :].transpose(0, 1).contiguous()
        return PrimalState(q_side, k_side, self.counts[:, -1, 0].to(self.total.dtype), key_sum)


def kernel_sides(
    features: FeaturePair, here: Sides, there: Sides, shard: Any = None
) -> tuple[Sides, Sides]:
    """Apply the maps that are modules, with their normaliser; fixed maps are left to the ops."""
    crossing = there is not here
    here = _mapped(features, here)
    there = _mapped(features, there) if crossing else here
    if not features.normalised:
        return here, there
    key_sum = zeroed(there.z[1], there.mask).sum(-2, keepdim=True)
    if shard is not None:
        (key_sum,) = shard.sum(key_sum)
    here = _normalised(here, key_sum)
    return here, _normalised(there, key_sum) if crossing else here


def causal_sides(
    features: FeaturePair, sides: Sides, state: PrimalState | None, *, static: bool
) -> tuple[Sides, Past]:
    """Return the sides as each token sees them; running means where weights are static."""
    seen = token_counts(sides.z[0, 0], _mask(sides), None if state is None else state.num_tokens)
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


def _mapped(features: FeaturePair, sides: Sides) -> Sides:
    if not features.has_modules:
        return sides
    queries, keys = features.queries(sides.z[0]), features.keys(sides.z[1])
    z = torch.stack((accumulate(queries.z), accumulate(keys.z)))
    return sides._replace(z=z, maps=(queries.feature_map, keys.feature_map))


def _normalised(sides: Sides, key_sum: Tensor) -> Sides:
    """Divide both sides by the square root of D-hat, Remark 4.1."""
    return sides._replace(z=sides.z * normaliser(sides.z[0], key_sum).rsqrt())
