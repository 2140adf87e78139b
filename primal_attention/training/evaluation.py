"""How good a model is on some cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primal_attention.tasks import Cases, Goal
from primal_attention.training.devices import mean_over_processes

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TOKENS, _SYMBOLS = 2**16, 2**18  # of a batch; models of symbols have short vectors


class Evaluation(NamedTuple):
    """The mean loss and the metric."""

    loss: float
    value: float


@torch.no_grad()
def evaluate(model: Any, goal: Goal, cases: Cases, fabric: Fabric) -> Evaluation:
    """Loss and metric of a model over all cases, shared out over the processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    mine = torch.arange(fabric.global_rank, len(cases), fabric.world_size, device=fabric.device)
    size = _batch_size(cases)
    batches = -(-len(cases) // (size * fabric.world_size))  # the same in every process
    for index in range(batches):
        # A sharded model needs every process in every pass, those without a case included.
        indices = mine[index * size : (index + 1) * size]
        batch = cases[indices if len(indices) else mine.new_zeros(1)]
        outputs = model(**batch.inputs)
        both = goal.losses(outputs, batch.target), goal.scores(outputs, batch.target)
        if len(indices):
            sums += torch.stack([each.double().sum() for each in both])
    means = mean_over_processes(fabric, sums) * fabric.world_size / len(cases)
    loss, score = means.tolist()
    return Evaluation(loss, goal.value(score))


def _batch_size(cases: Cases) -> int:
    x = next(iter(cases.inputs.values()))
    return max(1, (_TOKENS if x.is_floating_point() else _SYMBOLS) // x.shape[1])
