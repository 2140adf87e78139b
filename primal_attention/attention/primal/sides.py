"""The two sides of the kernel as the tokens see them: running means, learned maps, normalisers.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.primal.state import PrimalState
from primal_attention.feature_maps import normaliser
from primal_attention.ops.causal import running_mean, token_counts
from primal_attention.ops.primal import Sides, zeroed
from primal_attention.precision import accumulate


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
    mask = None if sides.mask is None else sides.mask[:, :, 0]
    seen = token_counts(sides.z[0, 0], mask, None if state is None else state.num_tokens)
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
