"""A Primal layer with static weights, folded for inference into two matrices.

    y = [Phi_q, Phi_k] M + b       M stacks A_e O and A_r O of all heads

with A_e = w_e C_e of one head and O that head's rows of the output projection: the score
projection, the weights and the output projection become one matrix, q and k another.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor, nn

from primal_attention.attention.base.decoder import Decoding
from primal_attention.attention.base.masks import check_inputs, zero_padding
from primal_attention.attention.base.projections import is_plain
from primal_attention.attention.primal.kernel import PrimalState, causal_sides, kernel_sides
from primal_attention.ops.primal import Sides, both_sides, features
from primal_attention.precision import accumulate

if TYPE_CHECKING:
    from primal_attention.attention.primal.layer import PrimalAttention


class FoldedPrimalAttention(nn.Module, Decoding):
    """The result of :meth:`PrimalAttention.fold`; it has no training behaviour and no statistics.

    Args:
        layer: A layer with static weights; its matrices are folded in at least float32.
    """

    @torch.no_grad()
    def __init__(self, layer: PrimalAttention):
        _check_foldable(layer)
        super().__init__()
        self.dim, self.num_heads, self.scores = layer.dim, layer.num_heads, layer.scores
        self.causal = layer.causal
        self.features = deepcopy(layer.features)
        self._initial_state = layer.init_state(1) if layer.causal else None
        sides = [side for side in (0, 1) if layer.scores in ("both", "er"[side])]
        needed = (0, 1) if layer.features.normalised else sides
        projections = [(layer.q_proj, layer.k_proj)[side] for side in needed]
        self._num_sides = len(projections)
        weight = torch.cat([each.weight for each in projections])
        has_bias = layer.q_proj.bias is not None
        self.qk_proj = _linear(
            weight, torch.cat([each.bias for each in projections]) if has_bias else None
        )
        out = rearrange(accumulate(layer.out_proj.weight), "d (h c) -> h c d", h=self.num_heads)
        score_maps = layer.score_proj.weight.chunk(len(sides), 1)  # C_e, C_r: [C, S]
        folded = []
        for side, score_map in zip(sides, score_maps, strict=True):
            w = accumulate((layer.w_e, layer.w_r)[side])
            folded.append(rearrange(w @ accumulate(score_map.mT) @ out, "h p d -> (h p) d"))
        bias = torch.zeros(())
        if layer.out_proj.bias is not None:
            bias = accumulate(layer.out_proj.bias)
        if layer.score_proj.bias is not None:
            bias = bias + accumulate(layer.score_proj.bias) @ out.sum(0)
        self.out_proj = _linear(torch.cat(folded).mT.to(weight.dtype), bias.to(weight.dtype))
        self.requires_grad_(False)
        self.eval()

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Attention outputs [B, N, D], as the layer that was folded gives them."""
        return self._run(x, None, token_mask)[0]

    def init_state(self, batch_size: int) -> PrimalState:
        """Return the state before the first token."""
        self._check_causal()
        assert self._initial_state is not None
        device = self.qk_proj.weight.device
        return PrimalState(
            *(t.to(device).expand(batch_size, *t.shape[1:]) for t in self._initial_state)
        )

    def prefill(
        self, x: Tensor, state: PrimalState | None = None, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, PrimalState]:
        """Return outputs of the tokens x that follow the state, and the state after them."""
        y, after = self._run(x, state or self.init_state(x.shape[0]), token_mask)
        assert after is not None
        return y, after

    def _run(
        self, x: Tensor, state: PrimalState | None, token_mask: Tensor | None
    ) -> tuple[Tensor, PrimalState | None]:
        check_inputs(self.dim, x, None, token_mask, None)
        qk = self.qk_proj(zero_padding(x, token_mask))
        heads = torch.unflatten(qk, -1, (self._num_sides, self.num_heads, -1))
        q, k = heads[:, :, 0], heads[:, :, -1]  # the same if only one side is output
        mask = None if token_mask is None else token_mask[:, :, None]
        sides = Sides(both_sides(q, k), None, None, self.features.names, mask)
        if self.causal:
            state = self.init_state(x.shape[0]) if state is None else state
            sides, past = causal_sides(self.features, sides, state, static=True)
            state = past.state()
        else:
            sides, _ = kernel_sides(self.features, sides, sides)
        output = {"both": slice(None), "e": slice(1), "r": slice(1, None)}[self.scores]
        phi = features(sides.z, sides.maps, None)[output]  # [sides, H, B, N, P]
        phi = phi.permute(2, 3, 0, 1, 4).flatten(2)
        return zero_padding(self.out_proj(phi.to(x.dtype)), token_mask), state


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
    for name in ("q_proj", "k_proj", "score_proj", "out_proj"):
        if not is_plain(getattr(layer, name)):
            raise ValueError(
                f"fold needs plain nn.Linear projections, but {name} is wrapped, replaced or "
                f"has hooks; merge adapters and remove hooks first"
            )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone().contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().expand(weight.shape[0]).clone())
    return linear
