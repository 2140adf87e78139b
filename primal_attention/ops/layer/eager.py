r"""All of a Primal layer as one op: projections, weights, scores, outputs and their statistics.

    q, k, h_e, h_r = W x + b        W_{e|X}, W_{r|X} static, sampled or dual

    heads = \phi_q(q) W_{e|X} C_e + \phi_k(k) W_{r|X} C_r + bias        y = W_o heads + b_o

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.causal.eager import running_mean, scan, token_counts
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.op import fused
from primal_attention.ops.primal.eager import Sides, gram, primal_scores, weights_given_x
from primal_attention.precision import accumulate


class LayerInputs(NamedTuple):
    """All that a layer makes its outputs of; parameters of any dtype meet tokens in that of x."""

    x: Tensor  # [B, N, D], zero at padded tokens
    q_weight: Tensor  # [H P, D]
    k_weight: Tensor
    h_weight: Tensor | None  # [2 H S, D], of H_e and H_r; None unless weights are dual
    q_bias: Tensor | None
    k_bias: Tensor | None
    h_bias: Tensor | None
    w_e: Tensor | None  # [H, M, S] with landmarks, [H, P, S] without; None for dual weights
    w_r: Tensor | None
    score_weight: Tensor  # [C, 2 S], or [C, S] of one side
    score_bias: Tensor | None  # [C]
    out_weight: Tensor | None  # [D, H C]; None: the outputs of the heads are wanted
    out_bias: Tensor | None
    raw_lambda: Tensor | None  # [H, S]; in the graph of the outputs, with the gradient zero
    positions: Tensor | None  # [B, M], of the landmarks; -1 for a row of zeros
    scale: float  # of all landmarks
    num_heads: int
    causal: bool
    token_mask: Tensor | None  # [B, N], True = real token
    scores: str  # which are output: both, e or r
    map_q: str
    map_k: str
    grams: bool  # whether Gram matrices are wanted

    @property
    def is_dual(self) -> bool:
        """True for dual weights, which have no W_e."""
        return self.w_e is None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """P, S and C."""
        C, columns = self.score_weight.shape
        S = columns // (2 if self.scores == "both" else 1)
        return self.q_weight.shape[0] // self.num_heads, S, C

    @property
    def counts(self) -> Tensor | None:
        """Real tokens up to each, [B, N]; None where all are real."""
        return None if self.token_mask is None else self.token_mask.cumsum(1)

    @property
    def maps(self) -> tuple[str, str]:
        """Feature maps of the queries and of the keys."""
        return self.map_q, self.map_k

    @property
    def landmarks(self) -> Landmarks | None:
        """Landmarks of x; None where no positions are given."""
        return None if self.positions is None else Landmarks(self.x, self.positions, self.scale)

    @property
    def score_maps(self) -> tuple[Tensor | None, Tensor | None]:
        """The parts C_e, C_r [S, C] of the score projection; None where a side is not output."""
        weight = self.score_weight
        if self.scores == "both":
            c_e, c_r = weight.chunk(2, 1)
            return c_e.mT, c_r.mT
        return (weight.mT, None) if self.scores == "e" else (None, weight.mT)

    @property
    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of q, k and h one below the other, in the dtype of x."""
        weights = [w for w in (self.q_weight, self.k_weight, self.h_weight) if w is not None]
        biases = [b for b in (self.q_bias, self.k_bias, self.h_bias) if b is not None]
        dtype = self.x.dtype
        return torch.cat(weights).to(dtype), torch.cat(biases).to(dtype) if biases else None

    @property
    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output projection in the dtype of x."""
        assert self.out_weight is not None
        bias = None if self.out_bias is None else self.out_bias.to(self.x.dtype)
        return self.out_weight.to(self.x.dtype), bias


class LayerResult(NamedTuple):
    """Outputs of the layer and statistics for its objective."""

    out: Tensor  # [B, N, D], or [B, N, H, C]
    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over the real tokens; empty unless wanted
    gram_k: Tensor
    w_e_given_x: Tensor  # [B, H, P, S], or [H, P, S] of static weights
    w_r_given_x: Tensor
    trace: Tensor  # [H] = Tr(w_e^T w_r) of sampled weights; empty where the weights given X have it
    lambda_diag: Tensor  # [H, S]; empty without Lambda


def fused_layer(inputs: LayerInputs) -> LayerResult | None:
    """Compute the layer as one op with one backward pass; None for small or unsupported work."""
    found = fused("layer", inputs)
    return None if found is None else LayerResult(*found)


def layer(inputs: LayerInputs) -> LayerResult:
    """Compute the layer in plain PyTorch, differentiable at will."""
    x, token_mask, maps = inputs.x, inputs.token_mask, inputs.maps
    mask = None if token_mask is None else token_mask[:, :, None]
    z, h = _projected(inputs)
    counts = token_counts(x, token_mask, None)[:, :, None]
    if inputs.is_dual and inputs.causal:
        assert h is not None
        scores, total = scan(z, h, maps, mask)
        scores = scores / counts.clamp(min=1)
        weights = total.flip(0) / counts.clamp(min=1)[:, -1:]
    else:
        if inputs.causal:
            z, _ = running_mean(z, mask, counts)
        sides = Sides(z, h, None, maps, mask)
        w_e, w_r = inputs.w_e, inputs.w_r
        both = None if w_e is None or w_r is None else torch.cat((w_e, w_r), -1)
        weights = weights_given_x(both, sides, sides, inputs.landmarks)
        scores = primal_scores(z, weights, maps, mask)
    gram_q, gram_k = gram(z, maps, mask).transpose(1, 2) if inputs.grams else x.new_empty(2, 0)
    w_e, w_r = weights.transpose(1, 2) if weights.ndim == 5 else weights
    statistics = parameter_trace(inputs), softplus_lambda(inputs)
    return LayerResult(_outputs(inputs, scores), gram_q, gram_k, w_e, w_r, *statistics)


def parameter_trace(inputs: LayerInputs) -> Tensor:
    """Tr(w_e^T w_r) of sampled weights, else empty."""
    w_e, w_r = inputs.w_e, inputs.w_r
    if inputs.positions is None or w_e is None or w_r is None:
        return inputs.x.new_empty(0, dtype=torch.float32)
    return (accumulate(w_e) * accumulate(w_r)).sum((-2, -1))


def softplus_lambda(inputs: LayerInputs) -> Tensor:
    """Return the diagonal of Lambda; empty without Lambda."""
    if inputs.raw_lambda is None:
        return inputs.x.new_empty(0, dtype=torch.float32)
    return F.softplus(accumulate(inputs.raw_lambda))


def _projected(inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
    """Project x to queries and keys [2, H, B, N, P], and to H_e and H_r of dual weights."""
    rows, H = F.linear(inputs.x, *inputs.projection), inputs.num_heads
    qk, h = rows.tensor_split((2 * H * inputs.sizes[0],), -1)
    sides = (torch.unflatten(each, -1, (2, H, -1)) for each in ((qk, h) if h.numel() else (qk,)))
    z, *rest = [each.permute(2, 3, 0, 1, 4) for each in sides]
    return z, rest[0] if rest else None


def _outputs(inputs: LayerInputs, scores: Tensor) -> Tensor:
    """Map the scores [2, H, B, N, S] to heads, zero at padded tokens, and these to the outputs."""
    out = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for score, c in zip(scores, inputs.score_maps, strict=True):
        out = out if c is None else out + score @ c.to(score.dtype)
    if inputs.score_bias is not None:
        out = out + inputs.score_bias.to(out.dtype)
    if inputs.token_mask is not None:
        out = torch.where(inputs.token_mask[:, :, None], out, 0.0)
    heads = out.permute(1, 2, 0, 3).to(inputs.x.dtype)
    if inputs.out_weight is None:
        return heads
    return F.linear(heads.flatten(2), *inputs.output_projection)
