"""Decoding token by token, on a GPU by replaying one recorded graph of launches.

Letters: B batch, N tokens, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.attention.base.inputs import check_inputs, outputs_of
from primal_attention.precision import accumulate

_WARM_UP = 3  # steps before the recording, in which libraries choose and allocate


class Decoding:
    """A layer whose causal form goes on from a state, token by token."""

    dim: int
    causal: bool
    q_proj: nn.Linear

    def init_state(self, batch_size: int) -> Any:
        """Return the state before the first token: a NamedTuple of tensors, batch first."""
        raise NotImplementedError

    def prefill(
        self, x: Tensor, state: Any = None, *, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return outputs [B, N, D] of tokens x that follow ``state``, and the state after them."""
        self._check_causal()
        check_inputs(self.dim, x, None, token_mask, None)
        if state is not None and len(state[0]) != len(x):
            raise ValueError(f"state is of {len(state[0])} sequences, x has {len(x)}")
        state = self.init_state(len(x)) if state is None else state
        return self._continued(x, token_mask, state)

    def _continued(self, x: Tensor, token_mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Output [B, D] of the next token x_t [B, D], and the state after it."""
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state

    def decoder(self, batch_size: int) -> Decoder:
        """Return the decoder of a batch, which replays one graph a token on a GPU."""
        return Decoder(self, batch_size)

    def _zeros(self, batch_size: int, *shape: int) -> Tensor:
        """Zeros [B, *shape] of a state, in at least float32, on the device of the queries."""
        self._check_causal()
        return accumulate(outputs_of(self.q_proj).new_zeros(batch_size, *shape))

    def _check_causal(self) -> None:
        if not self.causal:
            raise ValueError("prefill, step and init_state need a layer built with causal=True")


class Decoder:
    """The state of one batch, advanced by a token in each call: ``y_t = decoder(x_t)``.

    On a GPU the first call records the launches of a step, with its dtype and autocast, and further
    ones replay them as one graph. Weights may change between calls, but not move. No gradients are
    recorded.
    """

    def __init__(self, layer: Decoding, batch_size: int):
        self.layer, self.batch_size = layer, batch_size
        first = layer.init_state(batch_size)
        self.state = type(first)(*(each.clone() for each in first))  # none a view of another
        for name, tensor in first._asdict().items():
            if 0 in tensor.shape[1:2] and name != "key_sum":
                raise ValueError(
                    f"decoder needs a state of constant size, but {name} of "
                    f"{type(layer).__name__} grows with the tokens; use prefill and step"
                )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._x = self._y = torch.empty(0)

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to before the first token."""
        self._overwrite(self.layer.init_state(self.batch_size))

    @torch.no_grad()
    def prefill(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Return outputs [B, N, D] of the tokens x that come next."""
        y, state = self.layer.prefill(x, self.state, token_mask=token_mask)
        self._overwrite(state)
        return y

    @torch.no_grad()
    def __call__(self, x_t: Tensor) -> Tensor:
        """The output [B, D] of the next token x_t [B, D]."""
        if not x_t.is_cuda or torch.cuda.is_current_stream_capturing():
            return self._step(x_t)
        if self._graph is None or x_t.dtype != self._x.dtype:
            self._record(x_t)
        assert self._graph is not None
        self._x.copy_(x_t)
        self._graph.replay()
        return self._y.clone()

    def _step(self, x_t: Tensor) -> Tensor:
        y, state = self.layer.step(x_t, self.state)
        self._overwrite(state)
        return y

    def _overwrite(self, state: Any) -> None:
        for mine, its in zip(self.state, state, strict=True):
            mine.copy_(its)

    def _record(self, x_t: Tensor) -> None:
        before = [each.clone() for each in self.state]
        self._x = x_t.clone()
        side = torch.cuda.Stream(x_t.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(x_t.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._step(self._x)
        torch.cuda.current_stream(x_t.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._y = self._step(self._x)
        self._overwrite(before)
