"""The KSVD objectives, which are added to the task loss.

They need Gram matrices alone: with G_q = Phi_q^T Phi_q, a sum over tokens such as
sum_i e_i^T Lambda e_i is Tr(Lambda W_{e|X}^T G_q W_{e|X}).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_choice
from primal_attention.attention.primal.statistics import KSVDLayer, KSVDStatistics, Passes
from primal_attention.ops.objective import mean_over_sequences, unexplained_energy
from primal_attention.precision import without_autocast


def ksvd_loss(model: nn.Module, *, objective: str = "released") -> Tensor:
    """Compute the KSVD objective of all Primal layers, to be added to the task loss times eta.

    Args:
        model: Any module with Primal layers in it, after a forward pass in training mode.
        objective: One of

            - ``zero``: J^2 of eq. (10) and (11): a sum over tokens, the mean over heads, squared
              for each sequence; mean over the batch, sum over layers.
            - ``released``: the form of the released code for time series, reinforcement learning
              and language: Lambda squared, mean over tokens, mean over layers. The paper's values
              of eta go with this one and the next.
            - ``released_batch``: with the batch mean inside the square (long sequences, images).
            - ``explained_energy``: the fraction of the kernel's energy that the directions leave
              unexplained, mean over heads, sequences and layers. Its minimiser is the truncated
              SVD; that of the others need not be.

    A layer keeps its latest training pass in each thread; the objective uses the passes of the
    calling thread. Inside ``with record_ksvd(model):`` all passes are kept and their sequences
    averaged.
    """
    if objective not in OBJECTIVES:
        check_choice("objective", objective, OBJECTIVES)
    chosen, has_layer = OBJECTIVES[objective], False
    kept: list[Passes] = []
    for layer in model.modules():
        if isinstance(layer, KSVDLayer):
            has_layer, passes = True, layer.passes
            if passes.runs:
                kept.append(passes)
    if not has_layer:
        raise ValueError(f"ksvd_loss: {type(model).__name__} has no Primal layer")
    if not kept:
        raise RuntimeError(
            "ksvd_loss: no Primal layer has run in training mode in this thread; call "
            "model.train() and the forward pass first"
        )
    values: list[Tensor] = []
    with without_autocast(kept[0].runs[0].lambda_diag.device):
        for passes in kept:
            values.append(chosen.of_layer(passes.runs))
    value = values[0]
    if len(values) > 1:
        value = torch.stack(values).sum() if chosen.summed else torch.stack(values).mean()
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return value  # hooks have no meaning there
    return _ending_with_its_graph(value, kept) if torch.is_grad_enabled() else value


class Objective(NamedTuple):
    """An objective as a function of the passes of each layer."""

    of_run: Callable[[KSVDStatistics], Tensor]  # the mean over the sequences of a pass
    squared: bool = False  # the mean over the batch is squared
    summed: bool = False  # over the layers, in place of a mean

    def of_layer(self, runs: list[KSVDStatistics]) -> Tensor:
        """Average over the sequences of all passes that have a real token on either side."""
        for run in runs:
            if not run.with_gradients:
                raise RuntimeError(
                    "ksvd_loss: the forward pass ran with gradients disabled (no_grad, or "
                    "re-entrant activation checkpointing: use use_reentrant=False), so the "
                    "objective has no gradient"
                )
        if len(runs) == 1:
            mean = self.of_run(runs[0])
        else:
            counts = [(torch.minimum(run.num_queries, run.num_keys) > 0).sum() for run in runs]
            weights = torch.stack(counts)
            means = torch.stack([self.of_run(run) for run in runs])
            mean = (means * weights).sum() / weights.sum().clamp(min=1)
        return mean.square() if self.squared else mean


def _ending_with_its_graph(value: Tensor, kept: list[Passes]) -> Tensor:
    """Make the backward pass of the objective free the graph that it has used up.

    Else the graph and its nodes that accumulate gradients would live into the next step, on streams
    of their own, with which a CUDA graph that is captured there may not synchronise.
    """
    runs, differentiated = [], False
    for passes in kept:
        runs.append(passes.runs)
        for run in passes.runs:
            differentiated |= run.differentiated
    if differentiated:
        value = value if value.requires_grad else value.requires_grad_()
        value.register_hook(_refuse)  # type: ignore[no-untyped-call]
    elif value.requires_grad:

        def let_go(_: Tensor) -> None:
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                for passes, used in zip(kept, runs, strict=True):
                    if passes.runs is used:  # no newer ones have replaced them
                        passes.runs = [run.without_graph() for run in used]

        value.register_hook(let_go)  # type: ignore[no-untyped-call]
    return value


def _refuse(_: Tensor) -> None:
    raise RuntimeError(
        "ksvd_loss: a backward pass has used up the graph of this forward pass; run the layers "
        "again, or pass retain_graph=True to the first backward pass"
    )


@contextmanager
def record_ksvd(model: nn.Module) -> Iterator[None]:
    """Keep every training pass of each Primal layer that this thread runs, not only the latest.

    For layers that run more than once in a step: two towers, shared layers. The passes are kept
    after the block until the layer next runs; entering the block frees earlier ones.
    """
    kept = [layer.passes for layer in model.modules() if isinstance(layer, KSVDLayer)]
    for passes in kept:
        passes.runs = passes.runs if passes.blocks else []
        passes.blocks += 1
    try:
        yield
    finally:
        for passes in kept:
            passes.blocks -= 1


def _zero(run: KSVDStatistics) -> Tensor:
    return run.mean_j(averaged=run.averaged, lambda_squared=False, squared=True)


def _unexplained(run: KSVDStatistics) -> Tensor:
    """Average the unexplained fraction of the kernel's energy over heads and sequences."""
    grams, weights = run.sums.grams, run.sums.weights
    left = unexplained_energy(grams, weights, run.lambda_diag, run.x_sampled)
    return mean_over_sequences(left.mean(-1), run.num_queries, run.num_keys)


# Deviations D1, D2: lambda_diag^2 in place of Lambda, mean over tokens instead of the sum.
_released_j = partial(KSVDStatistics.mean_j, averaged=True, lambda_squared=True)

OBJECTIVES = {
    "zero": Objective(_zero, summed=True),
    "released": Objective(partial(_released_j, squared=True)),
    "released_batch": Objective(partial(_released_j, squared=False), squared=True),
    "explained_energy": Objective(_unexplained),
}
