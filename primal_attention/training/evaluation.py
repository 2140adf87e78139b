"""How good a model is on some cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primal_attention.distributed.context import shard_of
from primal_attention.tasks import Cases, Goal
from primal_attention.training.context import data_process, shard_batch
from primal_attention.training.devices import mean_over_processes

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TOKENS, _SYMBOLS = 2**16, 2**18  # of a batch; models of symbols have short vectors
_PIXELS = 2**23  # of a batch, where cases are pictures
_TARGETS = 2**13  # of a batch; each token then has as many outputs as there are symbols


class Evaluation(NamedTuple):
    """The mean loss and the metric."""

    loss: float
    value: float


@torch.no_grad()
def evaluate(model: Any, goal: Goal, cases: Cases, fabric: Fabric) -> Evaluation:
    """Loss and metric of a model over all cases, shared out over the processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
    shard = shard_of(model)
    process, processes = data_process(fabric, shard)
    mine = torch.arange(process, len(cases), processes, device=fabric.device)
    size = _batch_size(cases)
    batches = -(-len(cases) // (size * processes))  # the same in every process
    for index in range(batches):
        # A sharded model needs every process in every pass, those without a case included.
        indices = mine[index * size : (index + 1) * size]
        batch, share = shard_batch(cases[indices if len(indices) else mine.new_zeros(1)], shard)
        outputs = model(**batch.inputs)
        losses = goal.losses(outputs, batch.target)
        same = goal.scores is goal.losses
        scores = losses if same else goal.scores(outputs, batch.target)
        if len(indices):
            numbers = losses, scores, goal.weights(batch.target)
            sums += share * torch.stack([each.double().sum() for each in numbers])
    loss, score, weight = mean_over_processes(fabric, sums).tolist()
    return Evaluation(loss / weight, goal.value(score / weight))


def _batch_size(cases: Cases) -> int:
    if "pictures" in cases.inputs:
        first = cases[torch.zeros(1, dtype=torch.int64, device=cases.target.device)]
        return max(1, _PIXELS // first.inputs["pictures"].numel())
    x, target = next(iter(cases.inputs.values())), cases.target
    if target.ndim > 1 and not target.is_floating_point():
        return max(1, _TARGETS // target.shape[1])
    return max(1, (_TOKENS if x.is_floating_point() else _SYMBOLS) // x.shape[1])
