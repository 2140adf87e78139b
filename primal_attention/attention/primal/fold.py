"""A Primal layer with static weights, folded for inference into two matrices.

    y = [Phi_q, Phi_k] M + b       M stacks A_e O and A_r O of all heads

with A_e = w_e C_e of one head and O that head's rows of the output projection: the score
projection, the weights and the output projection become one matrix, q and k another.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim.
"""

from copy import deepcopy

import torch
from einops import rearrange
from torch import Tensor, nn

from primal_attention.attention.base.features import FeaturePair
from primal_attention.attention.base.masks import check_inputs, zero_padding
from primal_attention.attention.primal.kernel import PrimalState, causal_sides, kernel_sides
from primal_attention.ops.primal import Sides, both_sides, features
from primal_attention.precision import accumulate


class FoldedPrimalAttention(nn.Module):
    """What :meth:`PrimalAttention.fold` returns; it has no training behaviour and no statistics."""

    def __init__(
        self,
        qk_proj: nn.Linear,  # D -> 2 D: queries, then keys; D -> D where one of them suffices
        features: FeaturePair,
        out_proj: nn.Linear,  # 2 H P (or H P for one side of the scores) -> D
        *,
        num_heads: int,
        scores: str,
        initial_state: PrimalState | None,  # of one sequence; None where not causal
    ):
        super().__init__()
        self.qk_proj, self.features, self.out_proj = qk_proj, features, out_proj
        self.dim, self.num_heads, self.scores = out_proj.out_features, num_heads, scores
        self._num_sides = qk_proj.out_features // out_proj.out_features
        self._initial_state = initial_state
        self.requires_grad_(False)
        self.eval()

    @property
    def causal(self) -> bool:
        """Whether each token sees only itself and those before it."""
        return self._initial_state is not None

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Attention outputs [B, N, D], as the layer that was folded gives them."""
        return self._run(x, None, token_mask)[0]

    def init_state(self, batch_size: int) -> PrimalState:
        """The state before the first token."""
        if self._initial_state is None:
            raise ValueError("init_state needs a layer folded with causal=True")
        device = self.qk_proj.weight.device
        return PrimalState(
            *(t.to(device).expand(batch_size, *t.shape[1:]) for t in self._initial_state)
        )

    def prefill(
        self, x: Tensor, state: PrimalState | None = None, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, PrimalState]:
        """Outputs of the tokens x that follow the state, and the state after them."""
        y, after = self._run(x, state or self.init_state(x.shape[0]), token_mask)
        assert after is not None
        return y, after

    def step(self, x_t: Tensor, state: PrimalState) -> tuple[Tensor, PrimalState]:
        """One token [B, D]."""
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state

    def _run(
        self, x: Tensor, state: PrimalState | None, token_mask: Tensor | None
    ) -> tuple[Tensor, PrimalState | None]:
        check_inputs(self.dim, x, None, token_mask, None)
        qk = self.qk_proj(zero_padding(x, token_mask))
        heads = torch.unflatten(qk, -1, (self._num_sides, self.num_heads, -1))
        q, k = heads[:, :, 0], heads[:, :, -1]  # the same where only one side is output
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


@torch.no_grad()
def fold_static(
    q_proj: nn.Linear,
    k_proj: nn.Linear,
    out_proj: nn.Linear,
    features: FeaturePair,
    weights: tuple[Tensor, Tensor],  # w_e, w_r [H, P, S]
    score_maps: tuple[Tensor | None, Tensor | None],  # C_e, C_r [S, C]
    score_bias: Tensor | None,  # [C]
    initial_state: PrimalState | None,
) -> FoldedPrimalAttention:
    """Fold the parts of a layer with static weights; computed in at least float32."""
    H = weights[0].shape[0]
    out_weight = rearrange(accumulate(out_proj.weight), "d (h c) -> h c d", h=H)
    stacked = [
        rearrange(accumulate(w) @ accumulate(c) @ out_weight, "h p d -> (h p) d")
        for w, c in zip(weights, score_maps, strict=True)
        if c is not None
    ]
    bias = accumulate(out_proj.bias) if out_proj.bias is not None else torch.zeros(())
    if score_bias is not None:
        bias = bias + accumulate(score_bias) @ out_weight.sum(0)
    sides = "".join(side for side, c in zip("er", score_maps, strict=True) if c is not None)
    needed = [
        projection
        for projection, c in zip((q_proj, k_proj), score_maps, strict=True)
        if c is not None or features.normalised
    ]
    return FoldedPrimalAttention(
        _linear(
            torch.cat([one.weight for one in needed]),
            None if q_proj.bias is None else torch.cat([one.bias for one in needed]),
        ),
        deepcopy(features),
        _linear(torch.cat(stacked).mT.to(q_proj.weight.dtype), bias.to(q_proj.weight.dtype)),
        num_heads=H,
        scores="both" if sides == "er" else sides,
        initial_state=initial_state,
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone().contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().expand(weight.shape[0]).clone())
    return linear
