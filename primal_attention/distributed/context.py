"""Shard the sequences of a model over processes, and inputs and outputs with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primal_attention.attention import ATTENTIONS
from primal_attention.attention.base.shards import Sharded
from primal_attention.distributed import collectives
from primal_attention.distributed.collectives import Group
from primal_attention.distributed.shard import ContextShard
from primal_attention.patching.hosts import HOSTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)
DIMENSION = "context"


def shard_context(
    model: Model, mesh: DeviceMesh | None, *, average_gradients: bool = True
) -> Model:
    """Let the processes of a mesh dimension share each sequence of a model; return the model.

    Each process then gives the model its own tokens of every sequence (``context_inputs``), in the
    order of the ranks, and gets the outputs of these. Objectives are those of whole sequences, the
    same in every process. The loss of a step is the mean of the losses of the processes.

    Args:
        model: A model, or a layer. All that mixes tokens must be Primal layers.
        mesh: A DeviceMesh with a dimension ``context``, or with one dimension. None undoes it.
        average_gradients: Average the gradients of the parameters over the dimension as they
            arise. Data parallelism over the processes of all dimensions does that too, and
            faster; FSDP has to: ``fully_shard(model, mesh=...)`` over all of them.
    """
    for handle in getattr(model, "_context_hooks", ()):
        handle.remove()
    shard = None if mesh is None else ContextShard(group_of(mesh))
    if shard is not None:
        check_shardable(model)
    for module in model.modules():
        if isinstance(module, Sharded):
            module.shard = shard
    model._context_hooks = []  # type: ignore[assignment]
    if shard is not None and average_gradients:
        average = partial(_averaged, shard.group)
        model._context_hooks = [  # type: ignore[assignment]
            each.register_hook(average)  # type: ignore[no-untyped-call]
            for each in model.parameters()
            if each.requires_grad and not isinstance(each, DTensor)
        ]
    return model


def group_of(mesh: DeviceMesh) -> Group:
    """Return the processes of the dimension ``context``, or of the only one."""
    names = mesh.mesh_dim_names
    if mesh.ndim > 1 and DIMENSION not in (names or ()):
        raise ValueError(f"mesh must have a dimension {DIMENSION!r}, got {names}")
    dimension = DIMENSION if names and DIMENSION in names else 0
    group = mesh.get_group(dimension)
    return Group(group.group_name, group.rank(), group.size())


def shard_of(model: nn.Module) -> ContextShard | None:
    """Return the shard of a model's sequences; None where they are whole."""
    shards = (module.shard for module in model.modules() if isinstance(module, Sharded))
    found: ContextShard | None = next(shards, None)
    return found


@contextmanager
def context_inputs(mesh: DeviceMesh, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield this process's tokens of tensors [B, N, ...] that all processes have; None stays.

    Shards differ by one token where N is no multiple of their number. A tensor that requires a
    gradient gets that of all its tokens, the mean over the processes.
    """
    group = group_of(mesh)
    yield tuple(None if each is None else split_tokens(each, group) for each in tensors)


def split_tokens(tensor: Tensor, group: Group) -> Tensor:
    """Select this process's tokens of a tensor [B, N, ...]."""
    if tensor.shape[1] < group.size:
        raise ValueError(
            f"sequences must have at least one token for each of {group.size} processes, got "
            f"{tensor.shape[1]}; pad them, with a mask, or use fewer processes"
        )
    if tensor.requires_grad:
        tensor = collectives.with_mean_gradient(tensor, group)
    return tensor.tensor_split(group.size, 1)[group.rank]


def join_tokens(shard: Tensor, mesh: DeviceMesh, num_tokens: int | None = None) -> Tensor:
    """Join the tokens [B, N, ...] of all processes, in each of them; undo ``context_inputs``.

    Without the number of tokens of whole sequences the processes tell each other how many they
    have, which synchronises.
    """
    group = group_of(mesh)
    if num_tokens is None:
        number = torch.tensor(shard.shape[1], device=shard.device)
        lengths = collectives.gathered(number, group).tolist()
    else:
        lengths = [
            num_tokens // group.size + (i < num_tokens % group.size) for i in range(group.size)
        ]
    missing = max(lengths) - shard.shape[1]
    rows = collectives.gathered(F.pad(shard, (*[0, 0] * (shard.ndim - 2), 0, missing)), group)
    return torch.cat([rows[i, :, :length] for i, length in enumerate(lengths)], 1)


def _averaged(group: Group, gradient: Tensor) -> Tensor:
    return collectives.total(gradient.detach(), group) / group.size


def check_shardable(model: nn.Module) -> None:
    """Raise where a module mixes tokens and cannot shard them."""
    known = (*ATTENTIONS.values(), nn.MultiheadAttention, nn.RNNBase)
    for name, module in model.named_modules():
        reason = None
        if isinstance(module, Sharded):
            reason = module.needs_whole()
        elif isinstance(module, known) or any(host.owns(module) for host in HOSTS):
            reason = f"{type(module).__name__} has no sharded form; patch it with a Primal layer"
        if reason is not None:
            raise ValueError(
                f"shard_context: {name or 'the model'} needs whole sequences: {reason}"
            )
