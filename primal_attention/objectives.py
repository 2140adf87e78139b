"""What is added to the task loss: the KSVD objectives, from Gram matrices alone.

With G_q = Phi_q^T Phi_q, a sum over tokens such as sum_i e_i^T Lambda e_i is
Tr(Lambda W_{e|X}^T G_q W_{e|X}), so no score is needed.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_choice
from primal_attention.attention.primal.statistics import KSVDLayer, KSVDStatistics, Passes
from primal_attention.ops.objective import mean_over_sequences, unexplained_energy
from primal_attention.precision import without_autocast


def ksvd_loss(model: nn.Module, *, objective: str = "released") -> Tensor:
    """The KSVD objective of all Primal layers of a model, for ``task_loss + eta * ksvd_loss``.

    Args:
        model: Any module with Primal layers in it, after a forward pass in training mode.
        objective: One of

            - ``zero``: J^2 of eq. (10) and (11): a sum over tokens, the mean over heads, squared
              for each sequence; mean over the batch, sum over layers.
            - ``released``: the same as the released code has it for time series, reinforcement
              learning and language: Lambda squared, mean over tokens, mean over layers. The
              paper's values of eta go with this one and the next.
            - ``released_batch``: with the batch mean inside the square (long sequences, images).
            - ``explained_energy``: the fraction of the kernel's energy that the directions leave
              unexplained, mean over heads, sequences and layers. Its minimiser is the truncated
              SVD; that of the others need not be.

    A layer keeps its latest training pass in each thread, and the objective is of the passes that
    the calling thread has run; inside ``with record_ksvd(model):`` all passes are kept and their
    sequences averaged over.
    """
    check_choice("objective", objective, _OBJECTIVES)
    layers = [layer for layer in model.modules() if isinstance(layer, KSVDLayer)]
    if not layers:
        raise ValueError(f"ksvd_loss: {type(model).__name__} has no Primal layer")
    kept = [layer.passes for layer in layers if layer.passes.runs]
    runs = [passes.runs for passes in kept]
    if not runs:
        raise RuntimeError(
            "ksvd_loss: no Primal layer has run in training mode in this thread; call "
            "model.train() and the forward pass first"
        )
    if not all(run.with_gradients for layer_runs in runs for run in layer_runs):
        raise RuntimeError(
            "ksvd_loss: the forward pass ran with gradients disabled (no_grad, or re-entrant "
            "activation checkpointing: use use_reentrant=False), so the objective has no gradient"
        )
    with without_autocast(runs[0][0].lambda_diag.device):
        values = [_OBJECTIVES[objective](layer_runs) for layer_runs in runs]
    value = values[0]
    if len(values) > 1:
        value = torch.stack(values).sum() if objective == "zero" else torch.stack(values).mean()
    return value if _is_traced() else _ending_with_its_graph(value, kept)


def _is_traced() -> bool:
    """Whether hooks have no meaning: the compiler or a functional transform differentiates."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _ending_with_its_graph(value: Tensor, kept: list[Passes]) -> Tensor:
    """The objective, whose backward pass lets go of the graph that it has used up.

    Else the graph, and with it the nodes that accumulate gradients, would live on into the next
    step: on streams of their own, which a CUDA graph that is captured there may not wait for.
    """
    if not torch.is_grad_enabled():
        return value
    runs = [passes.runs for passes in kept]
    if any(run.differentiated for layer_runs in runs for run in layer_runs):
        value = value if value.requires_grad else value.requires_grad_()
        value.register_hook(_refuse)  # type: ignore[no-untyped-call]
    elif value.requires_grad:

        def let_go(_: Tensor) -> None:
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                for passes, layer_runs in zip(kept, runs, strict=True):
                    passes.let_go(layer_runs)

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

    For layers that run more than once in a step: two towers, shared layers. The passes stay kept
    after the block, until the layer next runs. Entering the block lets go of what was kept before.
    """
    kept = [layer.passes for layer in model.modules() if isinstance(layer, KSVDLayer)]
    for passes in kept:
        passes.open_block()
    try:
        yield
    finally:
        for passes in kept:
            passes.close_block()


def _zero(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_runs([_mean_j(run, averaged=run.averaged) for run in runs], runs)


def _released(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_runs([_released_j(run, squared=True) for run in runs], runs)


def _released_batch(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_runs([_released_j(run, squared=False) for run in runs], runs).square()


def _explained_energy(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_runs([_unexplained(run) for run in runs], runs)


_OBJECTIVES: dict[str, Callable[[list[KSVDStatistics]], Tensor]] = {
    "zero": _zero,
    "released": _released,
    "released_batch": _released_batch,
    "explained_energy": _explained_energy,
}


def _released_j(run: KSVDStatistics, *, squared: bool) -> Tensor:
    #   Deviations D1, D2: lambda_diag^2 in place of Lambda, mean over tokens instead of the sum.
    return _mean_j(run, averaged=True, lambda_squared=True, squared=squared)


def _mean_j(
    run: KSVDStatistics, *, averaged: bool, lambda_squared: bool = False, squared: bool = True
) -> Tensor:
    """J of eq. (11), squared or not, the mean over the sequences of one pass."""
    return run.mean_j(averaged=averaged, lambda_squared=lambda_squared, squared=squared)


def _unexplained(run: KSVDStatistics) -> Tensor:
    """The fraction of the kernel's energy that is left, the mean over heads and sequences."""
    grams, weights = run.sums.grams, run.sums.weights
    left = unexplained_energy(grams, weights, run.lambda_diag, run.x_sampled)
    return mean_over_sequences(left.mean(-1), run.num_queries, run.num_keys)


def _mean_over_runs(means: list[Tensor], runs: list[KSVDStatistics]) -> Tensor:
    """The mean over the sequences of all passes that have a real token on either side."""
    if len(runs) == 1:
        return means[0]
    counts = [(torch.minimum(run.num_queries, run.num_keys) > 0).sum() for run in runs]
    weights = torch.stack(counts)
    return (torch.stack(means) * weights).sum() / weights.sum().clamp(min=1)
