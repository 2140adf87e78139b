r"""A Primal layer as a linear map of features that do not depend on its directions.

In all three forms of the weights the scores of a head are linear in what is learnt,
$e_i = \Theta_e^\top f_e(i)$ and $r_i = \Theta_r^\top f_r(i)$:

- static: $f_e = \phi_q(x_i)$ and $\Theta_e = w_e$;
- sampled: $f_e = X' \phi_q(x_i)$ with the landmarks X' of the head, and $\Theta_e = w_e$;
- dual: $f_e = \frac{1}{n} \sum_j \kappa(x_i, x_j) [x_j; 1]$ and $\Theta_e$ the projection to h_r;

and likewise for r with the sides of the kernel exchanged. Of these f, which are many, a basis keeps
what can be told apart with little data, $\Theta = \mathrm{basis} \, \theta$: for sampled weights
slow waves over the landmarks, for dual weights the values of the attention that was replaced.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks, F base features, R features kept of them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

from primal_attention.attention.base.masks import zero_padding
from primal_attention.attention.primal import FeaturesAndWeights, PrimalAttention
from primal_attention.ops.causal import token_counts

_NUM_WAVES = 16
_SIDES = {"both": ("e", "r"), "e": ("e",), "r": ("r",)}


@torch.no_grad()
def basis_of(layer: PrimalAttention, replaced: nn.Module) -> Tensor:
    """What is kept of the base features, [H, F, R].

    Args:
        layer: The new layer.
        replaced: The mechanism of the teacher that it stands in for.
    """
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
    """The features [B, N, H, side, R] of the sides that the layer outputs, e before r.

    Args:
        layer: The layer, with the projections of queries and keys that it is to keep.
        basis: What to keep of them.
        x: Its input.
        **masks: The other arguments of its forward pass.
    """
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
    """Put the maps [side, H, F, S] of the base features where the layer keeps them."""
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
