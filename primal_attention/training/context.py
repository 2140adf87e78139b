"""Processes that share the tokens of each case, beside processes that share the cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from primal_attention.distributed.context import DIMENSION, split_tokens
from primal_attention.distributed.shard import ContextShard
from primal_attention.tasks.task import Batch

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def context_mesh(fabric: Fabric, context_parallel: int) -> DeviceMesh | None:
    """Let so many neighbouring processes share each sequence; None where each has its own."""
    if context_parallel < 1 or fabric.world_size % context_parallel:
        raise ValueError(
            f"context_parallel must divide the {fabric.world_size} processes of the run, got "
            f"{context_parallel}; start a multiple of it, for instance with torchrun"
        )
    if context_parallel == 1:
        return None
    shape = fabric.world_size // context_parallel, context_parallel
    return init_device_mesh(fabric.device.type, shape, mesh_dim_names=("data", DIMENSION))


def data_process(fabric: Fabric, shard: ContextShard | None) -> tuple[int, int]:
    """Return which share of the cases this process has, and how many shares there are."""
    size = 1 if shard is None else shard.size
    return fabric.global_rank // size, fabric.world_size // size


def shard_batch(batch: Batch, shard: ContextShard | None) -> tuple[Batch, float]:
    """Select this process's tokens of a batch; return with it how much its losses count for.

    A target for each token is shared out too, and its losses are means over a case.
    """
    if shard is None:
        return batch, 1.0
    inputs = {name: split_tokens(each, shard.group) for name, each in batch.inputs.items()}
    target = batch.target
    if target.ndim == 1 or target.is_floating_point():
        return Batch(inputs, target), 1.0
    mine = split_tokens(target, shard.group)
    return Batch(inputs, mine), mine.shape[1] * shard.size / target.shape[1]
