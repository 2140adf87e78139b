r"""Flow attention: linear attention under conservation of flow.

Letters: B batch, N tokens (sinks), T source tokens, H heads, C head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeatureSide
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.linear_core import key_moment, read_moment, scan_moment
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.ops.causal import token_counts
from primal_attention.precision import accumulate, exact

_EPS = 1e-6


class FlowState(NamedTuple):
    """The sums over the tokens so far: constant in their number, in at least float32."""

    q_sum: Tensor  # [B, H, C]: sinks
    k_sum: Tensor  # [B, H, C]: sources
    q_flow: Tensor  # [B, H, C]: sinks, each divided by its mean incoming flow
    k_flow: Tensor  # [B, H, C]: sources, each divided by its mean outgoing flow
    competition: Tensor  # [B, H]: the denominator of the softmax over the sources
    kv: Tensor  # [B, H, C, C]: moment of the sources and the values they won
    num_tokens: Tensor  # [B]


class FlowAttention(DecodingAttention):
    r"""Flowformer, Wu et al. 2022: values flow from sources (keys) to sinks (queries).

    With $\phi$ the sigmoid, n sinks and t sources:

    - incoming flow of a sink $I_i = \phi(q_i)^\top \sum_j \phi(k_j)$, outgoing flow of a source
      $O_j = \phi(k_j)^\top \sum_i \phi(q_i)$;
    - conserved $\hat I_i = \phi(q_i)^\top \sum_j \phi(k_j) / O_j$ and
      $\hat O_j = \phi(k_j)^\top \sum_i \phi(q_i) / I_i$;
    - competition of the sources $\hat v_j = t\, softmax_j(\hat O)\, v_j$;
    - aggregation and allocation to the sinks
      $o_i = \sigma(\hat I_i\, n / t) \frac{\phi(q_i)^\top}{I_i} \sum_j \phi(k_j) \hat v_j^\top$.

    As in the published code, $\hat O$ is clamped to [-1, 1] before the softmax, and 1e-6 is added
    to both factors of the four flows. Only real tokens are summed over and counted.

    Causal, as published: all sums, that of the softmax too, run up to the token; where the flows
    are refined they are means over the t tokens up to theirs, and t replaces n and the number of
    sources.
    """

    mechanism = Mechanism(
        "Wu et al., 2022",
        "N",
        causal=True,
        cross=True,
        decode="sums of constant size",
        rotary=True,
        sums_over_queries=lambda layer: True,
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Attend by sums over all tokens, or up to each one where the layer is causal."""
        if self.causal:
            return self.extend(q, k, v, self.init_state(q.shape[0]), mask)[0]
        return _flow(q, k, v, mask, source_mask)

    def num_before(self, state: FlowState) -> Tensor:
        """Return the number of tokens in the sums."""
        return state.num_tokens

    def init_state(self, batch_size: int) -> FlowState:
        """Return the state before the first token."""
        kv = self._zeros(batch_size, self.num_heads, self.head_dim, self.head_dim)
        vector, number = kv[..., 0], kv[..., 0, 0]
        return FlowState(vector, vector, vector, vector, number, kv, number[:, 0])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: FlowState, mask: Tensor | None
    ) -> tuple[Tensor, FlowState]:
        """Running sums that start from those of the state."""
        return _causal_flow(q, k, v, state, mask)


@exact
def _flow(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
) -> Tensor:
    sinks = zero_padding(accumulate(q).sigmoid(), mask)  # [B, N, H, C]
    sources = zero_padding(accumulate(k).sigmoid(), source_mask)  # [B, T, H, C]
    num_sinks, num_sources = _count(q, mask), _count(k, source_mask)
    incoming = _flow_through(sinks, sources.sum(1, keepdim=True))  # [B, N, H]
    outgoing = _flow_through(sources, sinks.sum(1, keepdim=True))  # [B, T, H]
    sent, received = sources / outgoing[..., None], sinks / incoming[..., None]
    conserved_in = _flow_through(sinks, sent.sum(1, keepdim=True))
    conserved_out = _flow_through(sources, received.sum(1, keepdim=True))
    strength = zero_padding(conserved_out.clamp(-1.0, 1.0).exp(), source_mask)
    share = strength / strength.sum(1, keepdim=True).clamp(min=_EPS) * num_sources
    allocation = (conserved_in * num_sinks / num_sources.clamp(min=1)).sigmoid()
    total = key_moment(FeatureSide(sources), accumulate(v) * share[..., None], None)
    read = read_moment(total, FeatureSide(received))
    return (read * allocation[..., None]).to(v.dtype)


@exact
def _causal_flow(
    q: Tensor, k: Tensor, v: Tensor, state: FlowState, mask: Tensor | None
) -> tuple[Tensor, FlowState]:
    sinks, sources = (zero_padding(accumulate(z).sigmoid(), mask) for z in (q, k))  # [B, N, H, C]
    counts = token_counts(q, mask, state.num_tokens)  # [B, N]
    number = counts.clamp(min=1)[..., None].to(sinks.dtype)
    q_sum, k_sum = _running(sinks, state.q_sum), _running(sources, state.k_sum)
    incoming = _flow_through(sinks, k_sum) / number
    outgoing = _flow_through(sources, q_sum) / number
    q_flow = _running(sinks / incoming[..., None], state.q_flow)
    k_flow = _running(sources / outgoing[..., None], state.k_flow)
    conserved_in = _flow_through(sinks, k_flow) / number
    conserved_out = _flow_through(sources, q_flow) / number
    strength = zero_padding(conserved_out.clamp(-1.0, 1.0).exp(), mask)
    competition = _running(strength, state.competition)
    share = strength / competition.clamp(min=_EPS) * number
    read, kv = scan_moment(
        FeatureSide(sinks / (incoming * number)[..., None]),
        FeatureSide(sources),
        accumulate(v) * share[..., None],
        state.kv,
        mask,
    )
    sums = q_sum[:, -1], k_sum[:, -1], q_flow[:, -1], k_flow[:, -1], competition[:, -1]
    after = FlowState(*sums, kv, counts[:, -1].to(kv.dtype))
    return (read * conserved_in.sigmoid()[..., None]).to(v.dtype), after


def _flow_through(z: Tensor, total: Tensor) -> Tensor:
    """The flow [B, N, H] between each token z [B, N, H, C] and the total of the other side."""
    return ((z + _EPS) * (total + _EPS)).sum(-1)


def _running(z: Tensor, before: Tensor) -> Tensor:
    return z.cumsum(1) + before[:, None]


def _count(z: Tensor, mask: Tensor | None) -> Tensor:
    """Count the real tokens, [B, 1, 1] or [1, 1, 1]."""
    if mask is None:
        return torch.full((1, 1, 1), z.shape[1], device=z.device)
    return mask.sum(1)[:, None, None]
