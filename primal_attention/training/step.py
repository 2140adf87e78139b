"""One step of training, and its replay as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from primal_attention.distributed.context import shard_of
from primal_attention.objectives import ksvd_loss, record_ksvd
from primal_attention.tasks import Task
from primal_attention.training.context import data_process, shard_batch
from primal_attention.training.model_factory import uses_objective
from primal_attention.training.recipe import Recipe
from primal_attention.uncertainty import kl_divergence

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_WARM_UP = 3  # steps of each batch size before the next one is recorded


class Step:
    """Forward, objective, backward, clipping and update on a batch of cases.

    Neither it nor its replay waits for the device.
    """

    def __init__(self, recipe: Recipe, task: Task, fabric: Fabric, model: Any, optimizer: Any):
        self.recipe, self.task, self.fabric = recipe, task, fabric
        self.model, self.optimizer = model, optimizer
        self.with_objective, self.shard = uses_objective(recipe, model), shard_of(model)
        replayed = can_replay(recipe, fabric) and task.train.resident
        self.update = Replayed(self._update) if replayed else self._update
        self.lr = torch.zeros((), device=fabric.device)

    def __call__(self, indices: Tensor, lr: float) -> Tensor:
        """Train on the cases with those indices; returns task loss and objective, [2]."""
        self._set_lr(lr)
        process, processes = data_process(self.fabric, self.shard)
        mine = indices[process::processes]
        # Processes average their gradients, so one with more cases has to count for more; one
        # without any takes part with a case that counts for nothing.
        share = len(mine) * processes / len(indices)
        return self.update(mine if len(mine) else indices[:1], share)

    def _update(self, indices: Tensor, share: float) -> Tensor:
        optim = self.recipe.optim
        batch, weight = shard_batch(self.task.train.drawn(indices), self.shard)
        with record_ksvd(self.model):
            loss = self.task.goal.losses(self.model(**batch.inputs), batch.target).mean() * weight
        objective = loss.new_zeros(())
        if self.with_objective:
            objective = ksvd_loss(self.model, objective=optim.objective)
        total = loss + optim.eta * objective
        if self.recipe.model.uncertainty:
            total = total + optim.kl_weight / len(self.task.train) * kl_divergence(self.model)
        self.fabric.backward(total * share)
        if optim.clip_norm is not None:
            self.fabric.clip_gradients(
                self.model,
                self.optimizer,
                max_norm=optim.clip_norm,
                error_if_nonfinite=False,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach(), objective.detach()]) * share

    def _set_lr(self, lr: float) -> None:
        """Set a number, or a tensor that a recorded update reads again at each replay."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr.fill_(lr) if group.get("capturable") else lr


class Replayed:
    """An update that is recorded once for each batch size and then replayed, without launches.

    Its random numbers go on as they would have: a replay reads the state of the generator.
    """

    def __init__(self, update: Callable[[Tensor, float], Tensor]):
        self.update = update
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.seen: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, indices: Tensor, share: float) -> Tensor:
        """Update with the share 1 of a single process."""
        size = len(indices)
        self.seen[size] = self.seen.get(size, 0) + 1
        if self.seen[size] <= _WARM_UP:
            return self._eagerly(indices)
        if size not in self.graphs:
            self.graphs[size] = self._record(indices)
        graph, inputs, output = self.graphs[size]
        inputs.copy_(indices)
        graph.replay()
        return output

    def _eagerly(self, indices: Tensor) -> Tensor:
        # On the stream of the recording: gradients are added up where they were first.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = self.update(indices, 1.0)
        current.wait_stream(self.stream)
        return output

    def _record(self, indices: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        graph, inputs = torch.cuda.CUDAGraph(), indices.clone()
        with garbage_kept(), torch.cuda.graph(graph, stream=self.stream):
            output = self.update(inputs, 1.0)
        return graph, inputs, output


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect garbage before, and none inside.

    To destroy the graph of an earlier run there would end the recording, and leave the random
    generator of the process unusable.
    """
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def can_replay(recipe: Recipe, fabric: Fabric) -> bool:
    """Return True for one process on a CUDA device; the scaler of fp16 synchronises each step."""
    alone = fabric.world_size == 1 and fabric.device.type == "cuda"
    return alone and recipe.run.precision != "fp16" and recipe.run.graph
