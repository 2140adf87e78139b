"""A Primal layer with static weights whose maps behind the features are one matrix.

    y = [Phi_q, Phi_k] M + b       M stacks A_e O and A_r O of all heads

with A_e = w_e C_e of one head and O that head's rows of the output projection.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from primal_attention.attention.base.compaction import Compaction
from primal_attention.attention.base.inputs import Tokens, is_plain, zero_padding
from primal_attention.attention.primal.kernel import Past, PrimalState, causal_sides, kernel_sides
from primal_attention.attention.primal.layer import PrimalAttention
from primal_attention.ops.primal import Sides, features
from primal_attention.precision import accumulate


class FoldedPrimalAttention(PrimalAttention):
    """The result of :meth:`PrimalAttention.fold`; it has no training behaviour and no statistics.

    Its scores are the features, [sides, H, B, N, P], which ``out_proj`` [D, sides H P] maps.
    """

    def _attend(
        self,
        of_tokens: tuple[Sides, Tokens],
        of_source: tuple[Sides, Tokens],
        state: PrimalState | None = None,
    ) -> tuple[Tensor, Past | None]:
        sides, past = of_tokens[0], None
        if self.causal:
            sides, past = causal_sides(self.features, sides, state, static=True)
        else:
            sides, _ = kernel_sides(self.features, sides, sides)
        return features(sides.z, sides.maps, None), past

    def _output(self, scores: Tensor, tokens: Tokens, padding: Compaction | None = None) -> Tensor:
        rows = self._chosen(scores).permute(2, 3, 0, 1, 4).flatten(2).to(tokens.x.dtype)
        rows = rows if padding is None else padding.unpack(rows)
        return zero_padding(self.out_proj(rows), tokens.mask)

    def _fused(self, tokens: Tokens) -> Tensor | None:
        return None


@torch.no_grad()
def folded(layer: PrimalAttention) -> FoldedPrimalAttention:
    """Fold the matrices of a copy of the layer, in at least float32."""
    _check_foldable(layer)
    copy: Any = deepcopy(layer).eval()
    out = rearrange(accumulate(layer.out_proj.weight), "d (h c) -> h c d", h=layer.num_heads)
    weights = accumulate(layer._chosen(torch.stack((layer.w_e, layer.w_r))))  # [sides, H, P, S]
    score_maps = torch.stack(layer.score_proj.weight.chunk(len(weights), 1))  # [sides, C, S]
    matrix = weights @ accumulate(score_maps).mT[:, None] @ out  # [sides, H, P, D]
    bias = out.new_zeros(layer.dim)
    if layer.out_proj.bias is not None:
        bias += accumulate(layer.out_proj.bias)
    if layer.score_proj.bias is not None:
        bias += accumulate(layer.score_proj.bias) @ out.sum(0)
    columns = matrix.flatten(0, 2).mT
    copy.out_proj = nn.Linear(columns.shape[1], layer.dim).to(layer.out_proj.weight)
    copy.out_proj.load_state_dict({"weight": columns, "bias": bias})
    for name in ("score_proj", "w_e", "w_r", "raw_lambda"):
        delattr(copy, name)
    copy.__class__ = FoldedPrimalAttention
    inference: FoldedPrimalAttention = copy.requires_grad_(False)
    return inference


def _check_foldable(layer: PrimalAttention) -> None:
    if layer.weights != "static":
        raise ValueError(
            f"fold needs weights='static', got {layer.weights!r}, which depend on the input"
        )
    if layer.score_norm or layer.gate or layer.rotary:
        raise ValueError(
            f"fold needs a map that is linear in the features, got score_norm="
            f"{layer.score_norm}, gate={layer.gate}, rotary={layer.rotary}"
        )
    for name in ("score_proj", "out_proj"):
        if not is_plain(getattr(layer, name)):
            raise ValueError(
                f"fold needs plain nn.Linear projections, but {name} is wrapped, replaced or "
                f"has hooks; merge adapters and remove hooks first"
            )
