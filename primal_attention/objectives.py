"""What is added to the task loss: the KSVD objectives, from Gram matrices alone.

With G_q = Phi_q^T Phi_q, a sum over tokens such as sum_i e_i^T Lambda e_i is
Tr(Lambda W_{e|X}^T G_q W_{e|X}), so no score is needed.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from einops import einsum
from torch import Tensor, nn

from primal_attention.attention.options import check_choice
from primal_attention.attention.statistics import KSVDLayer, KSVDStatistics
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

    A layer keeps its latest training pass; inside ``with record_ksvd(model):`` all passes are kept
    and their sequences averaged over.
    """
    check_choice("objective", objective, _OBJECTIVES)
    layers = [layer for layer in model.modules() if isinstance(layer, KSVDLayer)]
    if not layers:
        raise ValueError(f"ksvd_loss: {type(model).__name__} has no Primal layer")
    runs = [layer.ksvd_runs for layer in layers if layer.ksvd_runs]
    if not runs:
        raise RuntimeError(
            "ksvd_loss: no Primal layer has run in training mode; call model.train() and the "
            "forward pass first"
        )
    if not all(run.with_gradients for layer_runs in runs for run in layer_runs):
        raise RuntimeError(
            "ksvd_loss: the forward pass ran with gradients disabled (no_grad, or re-entrant "
            "activation checkpointing: use use_reentrant=False), so the objective has no gradient"
        )
    with without_autocast(runs[0][0].gram_q.device):
        values = torch.stack([_OBJECTIVES[objective](layer_runs) for layer_runs in runs])
    return values.sum() if objective == "zero" else values.mean()


@contextmanager
def record_ksvd(model: nn.Module) -> Iterator[None]:
    """Keep every training pass of each Primal layer, not only the latest.

    For layers that run more than once in a step: two towers, shared layers. The passes stay kept
    after the block, until the layer next runs. Entering the block lets go of what was kept before,
    and so of the last step's graph: a step that is captured as a CUDA graph has to begin with it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, KSVDLayer)]
    before = [layer.keep_all_runs for layer in layers]
    for layer in layers:
        if not layer.keep_all_runs:  # else an outer block is keeping them
            layer.ksvd_runs = []
        layer.keep_all_runs = True
    try:
        yield
    finally:
        for layer, keep in zip(layers, before, strict=True):
            layer.keep_all_runs = keep


def _zero(runs: list[KSVDStatistics]) -> Tensor:
    j = torch.cat([_objective(run, run.lambda_diag, averaged=run.averaged) for run in runs])
    return _mean_over_sequences(j.square(), runs)


def _released(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_sequences(_released_j(runs).square(), runs)


def _released_batch(runs: list[KSVDStatistics]) -> Tensor:
    return _mean_over_sequences(_released_j(runs), runs).square()


def _explained_energy(runs: list[KSVDStatistics]) -> Tensor:
    unexplained = torch.cat([_unexplained(run).mean(-1) for run in runs])
    return _mean_over_sequences(unexplained, runs)


_OBJECTIVES: dict[str, Callable[[list[KSVDStatistics]], Tensor]] = {
    "zero": _zero,
    "released": _released,
    "released_batch": _released_batch,
    "explained_energy": _explained_energy,
}


def _released_j(runs: list[KSVDStatistics]) -> Tensor:
    #   Deviations D1, D2: lambda_diag^2 in place of Lambda, mean over tokens instead of the sum.
    return torch.cat([_objective(run, run.lambda_diag.square(), averaged=True) for run in runs])


def _objective(run: KSVDStatistics, lambda_diag: Tensor, *, averaged: bool) -> Tensor:
    r"""J of eq. (11) for each sequence, the mean over its heads, [B]."""
    e_term = einsum(lambda_diag, _energies(run.gram_q, run.w_e_given_x), "h s, b h s -> b h") / 2
    r_term = einsum(lambda_diag, _energies(run.gram_k, run.w_r_given_x), "h s, b h s -> b h") / 2
    if averaged:
        e_term = e_term / run.num_queries.clamp(min=1)[:, None]
        r_term = r_term / run.num_keys.clamp(min=1)[:, None]
    return (e_term + r_term - run.trace).mean(-1)


def _energies(gram: Tensor, weights: Tensor) -> Tensor:
    """sum_i e_i^2 for each direction, diag(W^T G W), [B, H, S]."""
    return (weights * (gram @ weights)).sum(-2)


def _unexplained(run: KSVDStatistics) -> Tensor:
    r"""The fraction $|K - E \Lambda R^\top|_F^2 / |K|_F^2$ for each sequence and head, [B, H].

    It equals $Tr(G_q M G_k M^\top) / Tr(G_q A G_k A)$ with $M = A - W_{e|X} \Lambda W_{r|X}^\top$
    and $A = F_X^\top F_X$. A kernel without energy has nothing unexplained.
    """
    P = run.gram_q.shape[-1]
    if run.x_sampled is None:
        a = torch.eye(P, dtype=run.gram_q.dtype, device=run.gram_q.device).expand_as(run.gram_q)
    else:
        a = einsum(run.x_sampled, run.x_sampled, "b h m p, b h m o -> b h p o")
    m = a - (run.w_e_given_x * run.lambda_diag[:, None, :]) @ run.w_r_given_x.mT
    size = a.detach().abs().amax((-2, -1), keepdim=True)  # cancels; keeps small inputs from 0 / 0
    size = torch.where(size >= torch.finfo(a.dtype).tiny, size, 1.0)
    energy, left = (_energy(run, middle / size) for middle in (a, m))
    some = energy > 0
    return torch.where(some, left / torch.where(some, energy, 1.0), 0.0)


def _energy(run: KSVDStatistics, middle: Tensor) -> Tensor:
    r"""$|\Phi_q M \Phi_k^\top|_F^2 = Tr(G_q M G_k M^\top)$, [B, H]."""
    return ((run.gram_q @ middle) * (middle @ run.gram_k)).sum((-2, -1))


def _mean_over_sequences(values: Tensor, runs: list[KSVDStatistics]) -> Tensor:
    """The mean over the sequences that have a real token on either side."""
    real = torch.cat([(run.num_queries > 0) & (run.num_keys > 0) for run in runs])
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)
