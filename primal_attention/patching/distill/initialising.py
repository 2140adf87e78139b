"""Parameters of patched layers from data, in closed form, before any gradient step.

For Primal: directions by regression of reduced rank from its base features to the teacher's output,
the heads fitted in turn, then the output map by ridge. For any other mechanism: the output map.

Letters: T tokens, D model dim, H heads, C head dim, S directions, R features kept of the base
features, K blocks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from primal_attention.attention.primal import PrimalAttention
from primal_attention.patching.distill.base_features import base_features, basis_of, set_directions
from primal_attention.patching.distill.collecting import Call, as_called
from primal_attention.patching.distill.least_squares import (
    StreamedSums,
    block_diagonal,
    compressed,
    low_rank_blocks,
    ridge,
)
from primal_attention.patching.hosts.host import PatchedAttention


class Fit(Protocol):
    """A layer that is fitted to calls of the attention it replaces."""

    def add(self, call: Call) -> None:
        """Count one call in."""

    def finish(self) -> None:
        """Solve, and set the parameters of the layer."""


def fit_of(layer: PatchedAttention, replaced: nn.Module) -> Fit:
    """How a layer is fitted.

    Args:
        layer: The new layer.
        replaced: The mechanism of the teacher in the same place.
    """
    mechanism = layer.mechanism
    if isinstance(mechanism, PrimalAttention):
        bent = mechanism.decay is not None, mechanism.score_norm, mechanism.gate, mechanism.rotary
        if not any(bent):  # the outputs are linear in the directions
            return _PrimalFit(layer, mechanism, replaced)
    return _OutputFit(layer)


class _Shape(NamedTuple):
    """How the channels of a head are shared among the sides of its scores."""

    num_sides: int
    joint: bool  # both sides fill all channels; else each fills its own
    rank: int  # channels that a block fills: a head where joint, else a side of a head

    @classmethod
    def of(cls, mechanism: PrimalAttention) -> _Shape:
        S, C = mechanism.num_directions, mechanism.head_dim
        num_sides = 2 if mechanism.scores == "both" else 1
        if num_sides == 1 or S >= C:
            return cls(num_sides, joint=True, rank=min(S, C))
        return cls(num_sides, joint=False, rank=min(S, C // 2))


class _PrimalFit:
    """The directions, the score projection and the output projection of a Primal layer."""

    def __init__(self, layer: PatchedAttention, mechanism: PrimalAttention, replaced: nn.Module):
        self.layer, self.mechanism = layer, mechanism
        self.shape = _Shape.of(mechanism)
        self.basis = basis_of(mechanism, replaced)  # [H, F, R]
        self.sums = StreamedSums()

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Count one call in."""
        with as_called(self.layer, call):
            features = base_features(self.mechanism, self.basis, call.x, **call.masks)
        self.sums.add(call.real(features).flatten(1), call.real(call.y))

    @torch.no_grad()
    def finish(self) -> None:
        """Solve, and set the parameters."""
        mechanism, (num_sides, joint, rank) = self.mechanism, self.shape
        has_bias = mechanism.out_proj.bias is not None
        moments = self.sums.moments(centred=has_bias)
        penalty = self.sums.penalty(centred=has_bias)
        num_blocks = mechanism.num_heads * (1 if joint else num_sides)
        inner = low_rank_blocks(moments, num_blocks, rank, penalty)  # [K, side R or R, rank]
        outer = ridge(compressed(moments, inner), penalty)  # [K rank, D]
        self._set_outer(outer)
        if mechanism.score_proj.bias is not None:
            mechanism.score_proj.bias.zero_()
        if has_bias:
            mean_features, mean_targets = self.sums.means()
            mean = mean_features @ block_diagonal(inner) @ outer
            mechanism.out_proj.bias.copy_(mean_targets - mean)
        pattern = "h (side r) c -> side h r c" if joint else "(h side) r c -> side h r c"
        self._set_inner(rearrange(inner, pattern, side=num_sides))

    def _set_outer(self, outer: Tensor) -> None:
        H, weight = self.mechanism.num_heads, self.mechanism.out_proj.weight
        columns = rearrange(outer, "(h c) d -> d h c", h=H)
        rearrange(weight, "d (h c) -> d h c", h=H)[..., : columns.shape[-1]] = columns.to(weight)

    def _set_inner(self, inner: Tensor) -> None:
        """Spread the channels over all directions, by a random rotation, and set both maps."""
        mechanism, (num_sides, joint, rank) = self.mechanism, self.shape
        S = mechanism.num_directions
        spread = torch.linalg.qr(torch.randn(num_sides, S, S).to(inner)).Q[..., :rank]
        maps = inner.new_zeros(num_sides, S, mechanism.head_dim)
        for side in range(num_sides):
            first = 0 if joint else side * rank
            maps[side, :, first : first + rank] = spread[side]
        mechanism.score_proj.weight.copy_(rearrange(maps, "side s c -> c (side s)"))
        theta = einsum(inner, spread, "side h r c, side s c -> side h r s")
        theta = einsum(self.basis.to(theta), theta, "h f r, side h r s -> side h f s")
        set_directions(mechanism, theta)


class _OutputFit:
    """The output map of any mechanism, by ridge regression of what its present map leaves."""

    def __init__(self, layer: PatchedAttention):
        self.layer, self.out_proj = layer, layer.mechanism.out_proj
        self.sums = StreamedSums()

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Count one call in."""
        inputs: list[Tensor] = []
        hook = self.out_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            with as_called(self.layer, call) as mechanism:
                y = mechanism(call.x, **call.masks)
        finally:
            hook.remove()
        self.sums.add(call.real(inputs[0]), call.real(call.y) - call.real(y))

    @torch.no_grad()
    def finish(self) -> None:
        """Solve, and change the output map."""
        weight, bias = self.out_proj.weight, self.out_proj.bias
        has_bias = bias is not None
        penalty = self.sums.penalty(centred=has_bias)
        change = ridge(self.sums.moments(centred=has_bias), penalty)
        weight.add_(change.mT.to(weight))
        if bias is not None:
            mean_features, mean_targets = self.sums.means()
            bias.add_((mean_targets - mean_features @ change).to(bias))
