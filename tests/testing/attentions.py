"""Small attention modules that keep the contract."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

DIM = 6
HEAD = 3


def valid(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """The mask, or True everywhere; [B, N, 1]."""
    if token_mask is None:
        return torch.ones(*x.shape[:2], 1, dtype=torch.bool, device=x.device)
    return token_mask[..., None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and states: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class Softmax(nn.Module):
    """Correct softmax attention with two heads and cross-attention."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(DIM, DIM, bias=bias) for _ in range(4)
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        if context is None:
            context, context_mask = x, token_mask
        real, real_context = valid(x, token_mask), valid(context, context_mask)
        x, context = x.masked_fill(~real, 0.0), context.masked_fill(~real_context, 0.0)
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(context)), self.v_proj(context)
        keys = real_context.mT[:, None]  # [B, 1, 1, M]
        scores = (q @ k.mT * HEAD**-0.5).masked_fill(~keys, torch.finfo(q.dtype).min)
        weights = scores.softmax(-1) * keys
        out = (weights @ self.heads(v)).transpose(1, 2).flatten(2)
        return self.out_proj(out).masked_fill(~real, 0.0)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class Linear(nn.Module):
    """Correct linear attention without a context."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(DIM, DIM, bias=bias) for _ in range(4)
        )

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        real = valid(x, token_mask)
        return self.attend(self.clean(x, real), real).masked_fill(~real, 0.0)

    def clean(self, x: Tensor, real: Tensor) -> Tensor:
        return x.masked_fill(~real, 0.0)

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.features(self.q_proj(x)), self.features(self.k_proj(x)), self.v_proj(x)
        return self.combine(q, self.mask_keys(k, real), v.masked_fill(~real, 0.0))

    def features(self, x: Tensor) -> Tensor:
        return elu(x) + 1

    def mask_keys(self, k: Tensor, real: Tensor) -> Tensor:
        return k.masked_fill(~real, 0.0)

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = q @ (k.mT @ v)
        norm = q @ k.sum(1)[..., None] + 1e-3
        return self.out_proj(total / norm)


class State(NamedTuple):
    kv: Tensor  # [B, D, D]
    k: Tensor  # [B, D]


class CausalWithoutState(Linear):
    """Correct causal linear attention that cannot decode step by step."""

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        zeros = torch.zeros(q.shape[0], DIM, DIM, device=q.device, dtype=wide(q.dtype))
        return self.scan(q, k, v, State(zeros, zeros[:, 0]))[0]

    def scan(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        kv = state.kv[:, None] + (k[..., :, None] * v[..., None, :]).to(wide(k.dtype)).cumsum(1)
        sums = state.k[:, None] + k.to(wide(k.dtype)).cumsum(1)
        total = (q[..., None, :] @ kv.to(q.dtype)).squeeze(-2)
        norm = (q * sums.to(q.dtype)).sum(-1, keepdim=True) + 1e-3
        return self.out_proj(total / norm), State(kv[:, -1], sums[:, -1])


class CausalLinear(CausalWithoutState):
    """Correct causal linear attention with a decode state."""

    def init_state(self, batch_size: int) -> State:
        like = next(self.parameters())
        zeros = torch.zeros(batch_size, DIM, DIM, device=like.device, dtype=wide(like.dtype))
        return State(zeros, zeros[:, 0])

    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        state = self.init_state(x.shape[0]) if state is None else state
        q, k = self.features(self.q_proj(x)), self.features(self.k_proj(x))
        return self.scan(q, k, self.v_proj(x), state)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state


class CausalSoftmax(Linear):
    """Correct causal softmax attention; its weights of zero meet the values of the future."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        scores = self.q_proj(x) @ self.k_proj(x).mT
        past = torch.ones_like(scores, dtype=torch.bool).tril() & real.mT
        weights = scores.masked_fill(~past, torch.finfo(scores.dtype).min).softmax(-1) * past
        return self.out_proj(weights @ self.v_proj(x))


class PositionWise(Linear):
    """Correct; each token by itself."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return self.out_proj(self.features(self.q_proj(x)))


class OneLengthExport(Linear):
    """Correct; a loop over chunks fixes the length of the exported graph."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.features(self.q_proj(x)), self.features(self.k_proj(x)), self.v_proj(x)
        k, v = self.mask_keys(k, real), v.masked_fill(~real, 0.0)
        starts = range(0, x.shape[1], 4)
        kv = sum(k[:, i : i + 4].mT @ v[:, i : i + 4] for i in starts)
        norm = q @ k.sum(1)[..., None] + 1e-3
        return self.out_proj(q @ kv / norm)


class ZeroInitialised(Linear):
    """Correct; its output projection starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)


class KeepsLoss(Linear):
    """Correct; in training each thread keeps the loss of its own last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.make_room()

    def make_room(self) -> None:
        self.kept = threading.local()

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, token_mask=token_mask)
        if self.training:
            self.kept.loss = y.square().mean()
        return y

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "kept"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.make_room()


def kept_loss(layer: KeepsLoss) -> Tensor:
    return layer.kept.loss
