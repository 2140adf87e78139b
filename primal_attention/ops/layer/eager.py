r"""All of a Primal layer between its tokens and its output projection, written with the other ops.

    q, k, h_e, h_r = W x + b        W_{e|X}, W_{r|X} static, sampled or dual

    out = \phi_q(q) W_{e|X} C_e + \phi_k(k) W_{r|X} C_r + bias

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.causal.eager import running_mean, scan, token_counts
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.op import fused
from primal_attention.ops.primal.eager import Sides, gram, primal_scores, weights_given_x


class LayerInputs(NamedTuple):
    """All that a layer makes its outputs of."""

    x: Tensor  # [B, N, D], in the dtype of the weight, zero at padded tokens
    weight: Tensor  # rows of q, of k and, of dual weights, of H_e and H_r: [2 H P (+ 2 H S), D]
    shift: Tensor | None  # their bias
    w_e: Tensor | None  # [H, M, S] with landmarks, [H, P, S] without; None for dual weights
    w_r: Tensor | None
    c_e: Tensor | None  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None  # at least one of the two is given
    bias: Tensor | None  # [C]
    landmarks: Landmarks | None  # of x
    num_heads: int
    causal: bool
    token_mask: Tensor | None  # [B, N], True = real token
    maps: tuple[str, str]  # of the queries and of the keys
    grams: bool  # whether Gram matrices are wanted

    @property
    def is_dual(self) -> bool:
        """Whether the weights are dual."""
        return self.w_e is None

    @property
    def num_directions(self) -> int:
        """S, from the output maps, of which there is at least one."""
        c = self.c_r if self.c_e is None else self.c_e
        assert c is not None, "one of c_e and c_r must be given"
        return c.shape[0]

    @property
    def feature_dim(self) -> int:
        """P."""
        dual = self.num_directions if self.is_dual else 0
        return self.weight.shape[0] // (2 * self.num_heads) - dual


class LayerResult(NamedTuple):
    """What the layer outputs and what its objective needs."""

    out: Tensor  # [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over the real tokens; empty unless wanted
    gram_k: Tensor
    w_e_given_x: Tensor  # [B, H, P, S], or [H, P, S] of static weights
    w_r_given_x: Tensor


class FlatInputs(NamedTuple):
    """The same inputs, without tuples among them."""

    x: Tensor
    weight: Tensor
    shift: Tensor | None
    w_e: Tensor | None
    w_r: Tensor | None
    c_e: Tensor | None
    c_r: Tensor | None
    bias: Tensor | None
    positions: Tensor | None
    scale: float
    num_heads: int
    causal: bool
    token_mask: Tensor | None
    map_q: str
    map_k: str
    grams: bool

    @classmethod
    def of(cls, given: LayerInputs) -> FlatInputs:
        """The inputs of a layer."""
        _, positions, scale = given.landmarks or (None, None, 1.0)
        sizes = given.num_heads, given.causal, given.token_mask
        return cls(*given[:8], positions, scale, *sizes, *given.maps, given.grams)

    def nested(self) -> LayerInputs:
        """The inputs of the layer again."""
        landmarks = None
        if self.positions is not None:
            landmarks = Landmarks(self.x, self.positions, self.scale)
        sizes = self.num_heads, self.causal, self.token_mask
        return LayerInputs(*self[:8], landmarks, *sizes, (self.map_q, self.map_k), self.grams)


def fused_layer(inputs: LayerInputs) -> LayerResult | None:
    """The layer as one op with one backward pass.

    None where no backend supports the inputs or the work is small: the caller takes the eager form.
    """
    found = fused("layer", FlatInputs.of(inputs))
    return None if found is None else LayerResult(*found)


def layer(inputs: LayerInputs) -> LayerResult:
    """The layer in plain PyTorch, differentiable at will."""
    x, token_mask, maps = inputs.x, inputs.token_mask, inputs.maps
    mask = None if token_mask is None else token_mask[:, :, None]
    z, h = _projected(inputs)
    counts = token_counts(x, token_mask, None)[:, :, None]
    grams = None
    if inputs.is_dual and inputs.causal:
        assert h is not None
        scores, total, grams = scan(z, h, maps, mask, grams=inputs.grams)
        scores = scores / counts.clamp(min=1)
        weights = total.flip(0) / counts.clamp(min=1)[:, -1:]
    else:
        if inputs.causal:
            z, _ = running_mean(z, mask, counts)
        sides, landmarks = Sides(z, h, None, maps, mask), inputs.landmarks
        landmarks = None if landmarks is None else landmarks._replace(x=x)
        weights = weights_given_x(_directions(inputs), sides, sides, landmarks)
        scores = primal_scores(z, weights, maps, mask)
    if inputs.grams and grams is None:
        grams = gram(z, maps, mask)
    by_sequence = None if grams is None else grams.transpose(1, 2)
    gram_q, gram_k = (x.new_empty(0), x.new_empty(0)) if by_sequence is None else by_sequence
    w_e, w_r = weights.transpose(1, 2) if weights.ndim == 5 else weights
    return LayerResult(_outputs(inputs, scores), gram_q, gram_k, w_e, w_r)


def _projected(inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
    """Queries and keys [2, H, B, N, P]; H_e and H_r [2, H, B, N, S] of dual weights."""
    rows, H = F.linear(inputs.x, inputs.weight, inputs.shift), inputs.num_heads
    qk, h = rows.tensor_split((2 * H * inputs.feature_dim,), -1)
    sides = (torch.unflatten(each, -1, (2, H, -1)) for each in ((qk, h) if h.numel() else (qk,)))
    z, *rest = [each.permute(2, 3, 0, 1, 4) for each in sides]
    return z, rest[0] if rest else None


def _directions(inputs: LayerInputs) -> Tensor | None:
    """Both parameters side by side; None for dual weights."""
    if inputs.w_e is None or inputs.w_r is None:
        return None
    return torch.cat((inputs.w_e, inputs.w_r), -1)


def _outputs(inputs: LayerInputs, scores: Tensor) -> Tensor:
    """The scores [2, H, B, N, S] mapped to the heads, [B, N, H, C]; zero at padded tokens."""
    pairs = zip(scores, (inputs.c_e, inputs.c_r), strict=True)
    out = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for score, c in pairs:
        out = out if c is None else out + score @ c.to(score.dtype)
    if inputs.bias is not None:
        out = out + inputs.bias.to(out.dtype)
    if inputs.token_mask is not None:
        out = torch.where(inputs.token_mask[:, :, None], out, 0.0)
    return out.permute(1, 2, 0, 3).to(inputs.x.dtype)
