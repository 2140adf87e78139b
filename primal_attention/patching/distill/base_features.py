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

from primal_attention.attention.base.masks import Tokens, real_tokens
from primal_attention.attention.primal import PrimalAttention
from primal_attention.ops.landmarks import landmarks

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
    tokens, source = _inputs(x, **masks)
    phi_q, phi_k = _both_sides(layer, tokens, source)
    if layer.weights == "static":
        e, r = phi_q, phi_k
    elif layer.weights == "sampled":
        rows = landmarks(source.x, layer.num_landmarks, token_mask=source.mask)
        x_given = einsum(_heads(layer, rows), basis, "b m h p, h m r -> b h p r")
        e, r = (einsum(phi, x_given, "b n h p, b h p r -> b n h r") for phi in (phi_q, phi_k))
    else:
        x = tokens.x if layer.h_proj.bias is None else F.pad(tokens.x, (0, 1), value=1.0)
        values = einsum(x, basis, "b n d, h d r -> b n h r")
        seen = _seen(tokens, causal=layer.causal)
        e, r = _means(phi_q, phi_k, values, seen), _means(phi_k, phi_q, values, seen)
    return torch.stack([{"e": e, "r": r}[side] for side in _SIDES[layer.scores]], dim=3)


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


def _inputs(
    x: Tensor,
    context: Tensor | None = None,
    token_mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> tuple[Tokens, Tokens]:
    tokens = real_tokens(x, token_mask)
    return tokens, tokens if context is None else real_tokens(context, context_mask)


def _both_sides(layer: PrimalAttention, tokens: Tokens, source: Tokens) -> tuple[Tensor, Tensor]:
    """phi_q and phi_k [B, N, H, P] of the tokens, as the layer has them."""
    phi = layer.kernel_features(tokens, source)
    phi_q, phi_k = phi.permute(0, 2, 3, 1, 4).unbind()
    return phi_q, phi_k


def _means(near: Tensor, far: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Means of the values over the tokens that each one sees, weighted by the kernel."""
    kernel = einsum(near, far, "b i h p, b j h p -> b h i j") * _shares(seen)[:, None]
    return einsum(kernel, values, "b h i j, b j h r -> b i h r")


def _shares(seen: Tensor) -> Tensor:
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


def _seen(tokens: Tokens, *, causal: bool) -> Tensor:
    """1 where token i sees token j, [B, N, N]."""
    B, N, _ = tokens.x.shape
    seen = tokens.x.new_ones(B, N, N)
    if tokens.mask is not None:
        seen = seen * tokens.mask[:, None, :]
    return seen.tril() if causal else seen


def _heads(layer: PrimalAttention, z: Tensor) -> Tensor:
    return rearrange(z, "b n (h c) -> b n h c", h=layer.num_heads)
