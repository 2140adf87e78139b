r"""Parameters of patched layers from data, in closed form, before any gradient step.

For Primal: directions by regression of reduced rank from its base features to the teacher's output,
the heads fitted in turn, then the output map by ridge. For any other mechanism: the output map.

In all three forms of the weights the scores of a head are linear in what is learnt,
$e_i = \Theta_e^\top f_e(i)$ and $r_i = \Theta_r^\top f_r(i)$:

- static: $f_e = \phi_q(x_i)$ and $\Theta_e = w_e$;
- sampled: $f_e = X' \phi_q(x_i)$ with the landmarks X' of the head, and $\Theta_e = w_e$;
- dual: $f_e = \frac{1}{n} \sum_j \kappa(x_i, x_j) [x_j; 1]$ and $\Theta_e$ the projection to h_r;

and likewise for r with the sides of the kernel exchanged. Of these f, which are many, a basis keeps
what can be told apart with little data, $\Theta = \mathrm{basis} \, \theta$: for sampled weights
slow waves over the landmarks, for dual weights the values of the attention that was replaced.

Letters: B batch, N tokens, T real tokens, D model dim, H heads, C head dim, P feature dim,
S directions, M landmarks, F base features, R features kept of them, K blocks.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.primal import FeaturesAndWeights, PrimalAttention
from primal_attention.ops.causal import token_counts
from primal_attention.patching.distill.batches import Batch
from primal_attention.patching.distill.least_squares import (
    Moments,
    StreamedSums,
    low_rank_blocks,
    ridge,
)
from primal_attention.patching.distill.matching import Call, Pair
from primal_attention.patching.distill.training import Event, Progress
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.hosts.transformers_attention import rotated
from primal_attention.patching.sites import patched_layers

_NUM_WAVES = 16
_SIDES = {"both": ("e", "r"), "e": ("e",), "r": ("r",)}


class OutputFit:
    """The output map of any mechanism, by ridge regression of what its present map leaves."""

    def __init__(self, layer: PatchedAttention):
        self.layer, self.out_proj = layer, layer.mechanism.out_proj
        self.sums = StreamedSums(centred=self.out_proj.bias is not None)

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Count in one call of the attention that the layer replaces."""
        inputs: list[Tensor] = []
        hook = self.out_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            y = call.repeated_by(self.layer)
        finally:
            hook.remove()
        self.sums.add(call.real(inputs[0]), call.real(call.y) - call.real(y))

    @torch.no_grad()
    def finish(self) -> None:
        """Solve, and set the parameters of the layer."""
        change = ridge(self.sums.moments(), self.sums.penalty())
        self.out_proj.weight.add_(change.mT.to(self.out_proj.weight))
        if self.out_proj.bias is not None:
            mean_features, mean_targets = self.sums.means()
            self.out_proj.bias.add_((mean_targets - mean_features @ change).to(self.out_proj.bias))


class PrimalFit:
    """The directions, the score projection and the output projection of a Primal layer.

    The sides of the scores fill all channels of a head together where there are enough directions;
    else each side fills channels of its own.
    """

    def __init__(self, layer: PatchedAttention, replaced: nn.Module):
        self.layer, self.mechanism = layer, layer.mechanism
        mechanism: PrimalAttention = layer.mechanism
        S, C = mechanism.num_directions, mechanism.head_dim
        self.num_sides = len(_SIDES[mechanism.scores])
        self.joint = self.num_sides == 1 or S >= C
        self.width = min(S, C if self.joint else C // 2)  # channels of a block
        self.sums = StreamedSums(centred=mechanism.out_proj.bias is not None)
        self.basis = basis_of(mechanism, replaced)  # [H, F, R]

    @torch.no_grad()
    def add(self, call: Call) -> None:
        """Count in one call of the attention that the layer replaces."""
        with rotated(call.rotation):
            features = base_features(self.mechanism, self.basis, call.x, **call.masks)
        self.sums.add(call.real(features).flatten(1), call.real(call.y))

    @torch.no_grad()
    def finish(self) -> None:
        """Solve, and set the parameters of the layer."""
        mechanism, H = self.mechanism, self.mechanism.num_heads
        moments, penalty = self.sums.moments(), self.sums.penalty()
        num_blocks = H * (1 if self.joint else self.num_sides)
        inner = low_rank_blocks(moments, num_blocks, self.width, penalty)  # [K, side R or R, width]
        whole: Tensor = torch.block_diag(*inner)  # type: ignore[no-untyped-call]
        compressed = Moments(whole.mT @ moments.gram @ whole, whole.mT @ moments.cross)
        outer = ridge(compressed, penalty)  # [K width, D]
        columns = rearrange(outer, "(h c) d -> d h c", h=H)
        weight = rearrange(mechanism.out_proj.weight, "d (h c) -> d h c", h=H)
        weight[..., : columns.shape[-1]] = columns.to(weight)
        if mechanism.score_proj.bias is not None:
            mechanism.score_proj.bias.zero_()
        if mechanism.out_proj.bias is not None:
            mean_features, mean_targets = self.sums.means()
            mechanism.out_proj.bias.copy_(mean_targets - mean_features @ whole @ outer)
        pattern = "h (side r) c -> side h r c" if self.joint else "(h side) r c -> side h r c"
        self._set_inner(rearrange(inner, pattern, side=self.num_sides))

    def _set_inner(self, inner: Tensor) -> None:
        """Spread the channels over all directions, by a random rotation, and set both maps."""
        mechanism, S = self.mechanism, self.mechanism.num_directions
        spread = torch.linalg.qr(torch.randn(self.num_sides, S, S).to(inner)).Q[..., : self.width]
        maps = inner.new_zeros(self.num_sides, S, mechanism.head_dim)
        for side in range(self.num_sides):
            first = 0 if self.joint else side * self.width
            maps[side, :, first : first + self.width] = spread[side]
        mechanism.score_proj.weight.copy_(rearrange(maps, "side s c -> c (side s)"))
        theta = einsum(inner, spread, "side h r c, side s c -> side h r s")
        theta = einsum(self.basis.to(theta), theta, "h f r, side h r s -> side h f s")
        set_directions(mechanism, theta)


def initialise(pair: Pair, batches: Iterable[Batch], number: int, progress: Progress) -> None:
    """Solve for the parameters of all layers in one pass over so many batches."""
    replaced = patched_layers(pair.teacher)
    fits = {name: fit_of(layer, replaced[name].mechanism) for name, layer in pair.layers.items()}
    for done, batch in enumerate(batches, 1):
        for name, calls in pair.teach(batch).calls.items():
            for call in calls:
                fits[name].add(call)
        progress(Event("initialisation from data", done, number, None))
    for fit in fits.values():
        fit.finish()


def fit_of(layer: PatchedAttention, replaced: nn.Module) -> PrimalFit | OutputFit:
    """Choose how a layer is fitted to the calls of the mechanism of the teacher it replaces."""
    mechanism = layer.mechanism
    if isinstance(mechanism, PrimalAttention):
        bent = mechanism.decay is not None, mechanism.score_norm, mechanism.gate, mechanism.rotary
        if not any(bent):  # the outputs are linear in the directions
            return PrimalFit(layer, replaced)
    return OutputFit(layer)


@torch.no_grad()
def basis_of(layer: PrimalAttention, replaced: nn.Module) -> Tensor:
    """Return the basis [H, F, R] of a layer's base features; ``replaced`` is the teacher's."""
    H, weight = layer.num_heads, layer.score_proj.weight
    if layer.weights == "static":
        return repeat(torch.eye(layer.features.feature_dim).to(weight), "f r -> h f r", h=H)
    if layer.weights == "sampled":
        return repeat(_waves(layer.num_landmarks).to(weight), "m r -> h m r", h=H)
    project = getattr(replaced, "v_proj", None) or layer.k_proj
    bias = project(weight.new_zeros(1, 1, layer.dim))
    values = project(torch.eye(layer.dim).to(weight)[None]) - bias
    basis = rearrange(values, "1 d (h c) -> h d c", h=H)
    if layer.h_proj.bias is None:
        return basis
    last = F.pad(rearrange(bias, "1 1 (h c) -> h 1 c", h=H), (0, 1), value=1.0)
    return torch.cat([F.pad(basis, (0, 1)), last], dim=1)


def base_features(layer: PrimalAttention, basis: Tensor, x: Tensor, **masks: Any) -> Tensor:
    """Return the features [B, N, H, side, R] of the sides that a layer outputs, e before r."""
    given = layer.features_and_weights(x, **masks)
    if layer.weights == "dual":
        x = zero_padding(x, given.token_mask)
        x = x if layer.h_proj.bias is None else F.pad(x, (0, 1), value=1.0)
        values = einsum(x, basis, "b n d, h d r -> b h n r")
        kernel = given.phi_q @ given.phi_k.mT
        e, r = (_means(each, values, given, causal=layer.causal) for each in (kernel, kernel.mT))
    else:
        e, r = given.phi_q, given.phi_k_at_x
        if given.x_sampled is not None:
            x_given = given.x_sampled.mT @ basis.to(e.dtype)
            e, r = e @ x_given, r @ x_given
    sides = {"e": e, "r": r}
    stacked = torch.stack([sides[side] for side in _SIDES[layer.scores]])
    return rearrange(stacked, "side b h n r -> b n h side r")


@torch.no_grad()
def set_directions(layer: PrimalAttention, theta: Tensor) -> None:
    """Write the maps [side, H, F, S] of the base features into the parameters of the layer."""
    for side, of_side in zip(_SIDES[layer.scores], theta, strict=True):
        if layer.weights != "dual":
            (layer.w_e if side == "e" else layer.w_r).copy_(of_side)
            continue
        rows = rearrange(of_side, "h f s -> (h s) f")
        half = slice(len(rows), None) if side == "e" else slice(len(rows))  # e is read from h_r
        layer.h_proj.weight[half] = rows[:, : layer.dim].to(layer.h_proj.weight)
        if layer.h_proj.bias is not None:
            layer.h_proj.bias[half] = rows[:, layer.dim].to(layer.h_proj.bias)


def _waves(length: int) -> Tensor:
    """The slowest cosines over so many places, orthonormal, [M, R]."""
    places = (torch.arange(length) + 0.5) / length
    waves = torch.cos(math.pi * places[:, None] * torch.arange(min(length, _NUM_WAVES)))
    return F.normalize(waves, dim=0)


def _means(kernel: Tensor, values: Tensor, given: FeaturesAndWeights, *, causal: bool) -> Tensor:
    """Means of the values [B, H, N, R] over the tokens that each one sees, by the kernel."""
    counts = token_counts(values[:, 0], given.token_mask, None)
    counts = counts if causal else counts[:, -1:]
    seen = kernel.tril() if causal else kernel
    return seen @ values / counts.clamp(min=1)[:, None, :, None]
