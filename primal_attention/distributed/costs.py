"""Messages, work and time of layers whose sequences are sharded, without running them.

Messages and floating-point operations are counted in a pass without data. The time is an alpha-beta
model: work over speed, plus for each message a latency for each hop of a tree and its bytes over
the bandwidth. Ring attention (Liu et al., 2023) sends keys and values around while it computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from primal_attention.attention.primal import PrimalAttention
from primal_attention.distributed.collectives import Group, Message, count_messages
from primal_attention.distributed.shard import ContextShard
from primal_attention.objectives import ksvd_loss

FORMS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "dual": {"weights": "dual"},
    "learned time": {"weights": "dual", "decay": "learned"},
    "causal static": {"weights": "static", "causal": True},
    "causal dual": {"weights": "dual", "causal": True},
    "causal, learned time": {"weights": "dual", "decay": "learned", "causal": True},
}
LENGTHS = (2**17, 2**20, 10**7, 10**9)
DEVICES = (1, 8, 64, 1024)


class Machine(NamedTuple):
    """Assumptions on the devices; by default round numbers of a card of 2024 on InfiniBand."""

    flops: float = 4e14  # per second, that a layer reaches in bfloat16
    bandwidth: float = 5e10  # bytes per second that a device sends
    latency: float = 1e-5  # seconds for a hop

    def time(self, messages: list[Message]) -> float:
        """Return the seconds that messages take one after the other."""
        seconds = 0.0
        for each in messages:
            hops = math.ceil(math.log2(each.size)) * (2 if each.kind == "all_reduce" else 1)
            seconds += hops * self.latency + each.sent / self.bandwidth
        return seconds


def layer_messages(layer: PrimalAttention, shards: int, *, batch: int = 1) -> list[Message]:
    """Return the messages of a training step of a layer, in order, its objective included."""
    with count_messages() as messages:
        _step(layer, shards, batch, 4)
    return messages


def layer_flops(layer: PrimalAttention) -> float:
    """Return the floating-point operations of a training step of a layer, for each token."""
    counts = []
    for length in (256, 512):
        with FlopCounterMode(display=False) as counter:
            _step(layer, 2, 1, length)
        counts.append(counter.get_total_flops())
    return float(counts[1] - counts[0]) / 256


def cost_table(
    lengths: Sequence[int], dim: int, num_heads: int, num_directions: int
) -> Iterator[str]:
    """Yield the lines of two tables: bytes of a layer, and modelled times beside ring attention."""
    machine = Machine()
    yield (
        f"A layer of dim {dim}, {num_heads} heads, {num_directions} directions in bfloat16, one "
        f"sequence: a training step with its objective."
    )
    yield "Bytes that a device sends, at any number of tokens:"
    yield f"{'form':22}" + "".join(f"{f'{each} devices':>16}" for each in DEVICES[1:])
    work, waits = {}, {}  # seconds a token, and of the messages by the number of devices
    for name, options in FORMS.items():
        layer = PrimalAttention(dim, num_heads, num_directions, **options).bfloat16()
        work[name] = layer_flops(layer) / machine.flops
        messages = {each: layer_messages(layer, each) for each in DEVICES[1:]}
        waits[name] = {1: 0.0} | {each: machine.time(found) for each, found in messages.items()}
        sent = (sum(each.sent for each in found) for found in messages.values())
        yield f"{name:22}" + "".join(f"{each:>16,.0f}" for each in sent)
    yield (
        f"Modelled milliseconds, with {machine.flops:.0e} operations and {machine.bandwidth:.0e} "
        f"bytes a second and {machine.latency:.0e} s a hop:"
    )
    yield f"{'tokens':>13} {'devices':>8}" + "".join(f"{n:>21}" for n in (*FORMS, "ring attention"))
    for num_tokens in lengths:
        for shards in DEVICES:
            times = [work[name] * num_tokens / shards + waits[name][shards] for name in FORMS]
            times.append(ring_time(dim, machine, num_tokens, shards))
            cells = "".join(f"{1000 * each:>21,.2f}" for each in times)
            yield f"{num_tokens:>13,} {shards:>8,}{cells}"


def ring_bytes(dim: int, num_tokens: int, shards: int, *, batch: int = 1) -> float:
    """Return the bytes that a device sends in a step of ring attention: k, v; then dk, dv too."""
    return 2 * 3 * batch * num_tokens * dim * (shards - 1) / shards * 2  # in bfloat16


def ring_time(dim: int, machine: Machine, num_tokens: int, shards: int, *, batch: int = 1) -> float:
    """Return the modelled seconds of a training step of ring attention, not causal.

    Its messages run beside its work, at best: the longer one counts. Four projections, and
    4 N^2 D operations forward and 10 N^2 D backward.
    """
    tokens = batch * num_tokens / shards
    work = (24 * tokens * dim**2 + 14 * tokens * num_tokens * dim) / machine.flops
    sent = ring_bytes(dim, num_tokens, shards, batch=batch) / machine.bandwidth
    return max(work, sent + 2 * (shards - 1) * machine.latency)


def _step(layer: PrimalAttention, shards: int, batch: int, length: int) -> None:
    """Run a training step on a device without data, as one shard of so many."""
    shard = ContextShard(Group("", shards // 2, shards))
    layer = copy.deepcopy(layer).to("meta").train()
    layer.shard = shard
    dtype = layer.out_proj.weight.dtype
    x = torch.randn(batch, length, layer.dim, dtype=dtype, device="meta", requires_grad=True)
    (layer(x).square().mean() + ksvd_loss(layer)).backward()
