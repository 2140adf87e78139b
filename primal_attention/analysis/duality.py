r"""Measure how far a Primal layer is from the KSVD that it stands for.

A layer has weights and Lambda; its scores e, r follow from them. At a solution of eq. (7) of
Chen et al. 2023 all six conditions of eq. (14) hold, the objective J is 0 (Lemma 4.2) and
$E \Lambda R^\top$ is the truncated SVD of the kernel matrix K. None of these is needed for a layer
to work, and J = 0 alone says little: it is one equation.

Static and sampled weights: $h_e = \Lambda e$, $h_r = \Lambda r$ by definition, so the conditions
on W_e and W_r are what can fail. Dual weights: W_e and W_r are made of h_e / n and h_r / n, so the
conditions $h_e = \Lambda e$, $h_r = \Lambda r$ are.

Letters: H heads, N queries, T keys, P features, S directions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.analysis.capture import Data, capture, find_layers
from primal_attention.analysis.captured import CapturedPrimal, PrimalSequence
from primal_attention.analysis.matrices import explained_energy
from primal_attention.analysis.running_stats import MeanDeviation, RunningStats
from primal_attention.analysis.text_table import text_table
from primal_attention.attention.primal import PrimalAttention
from primal_attention.theory import ksvd

DUALITY_COLUMNS = (
    *("layer", "weights", "directions", "KKT", "J", "relative J"),
    *("explained", "by subspaces", "best possible"),
)


class HeadDuality(NamedTuple):
    """All heads on one sequence, [H] each."""

    kkt: Tensor  # the largest relative error of eq. (14), at most 2
    objective: Tensor  # J of eq. (11); averaged over tokens for dual weights
    relative_objective: Tensor  # |J| over the sum of the sizes of its terms, in [0, 1]
    explained: Tensor  # 1 - |K - E Lambda R^T|^2 / |K|^2; below 0 where worse than nothing
    subspaces: Tensor  # the same with the best matrix in the place of Lambda, in [0, 1]
    best: Tensor  # the most that so many directions can explain


@dataclass(frozen=True)
class LayerDuality:
    """One layer; means and deviations over heads and sequences."""

    name: str
    weights: str  # static, sampled or dual
    num_directions: int
    kkt: MeanDeviation
    objective: MeanDeviation
    relative_objective: MeanDeviation
    explained: MeanDeviation
    subspaces: MeanDeviation
    best: MeanDeviation

    def cells(self) -> tuple[str, ...]:
        """Return the row of a printed table."""
        numbers = (str(getattr(self, name)) for name in HeadDuality._fields)
        return self.name, self.weights, str(self.num_directions), *numbers


@dataclass(frozen=True)
class Duality:
    """The Primal layers of a model; print it."""

    model: str
    layers: tuple[LayerDuality, ...]

    def __str__(self) -> str:
        title = f"{self.model}: {len(self.layers)} Primal layers against the KSVD of their kernels"
        return text_table(title, [DUALITY_COLUMNS, *(layer.cells() for layer in self.layers)])


def duality(model: nn.Module, data: Data) -> Duality:
    """Measure every Primal layer of a model against the KSVD of its kernel on the data.

    Args:
        model: A model with Primal layers, or such a layer.
        data: As for :func:`~primal_attention.analysis.spectrum`.
    """
    decays = [each.decay for each in model.modules() if isinstance(each, PrimalAttention)]
    if not decays:
        raise ValueError(f"model: {type(model).__name__} has no Primal layer")
    if None not in decays:
        raise ValueError(
            f"model: all Primal layers of {type(model).__name__} have a decay, whose weights are "
            f"another matrix at each token; there is no KKT residual of them"
        )
    layers = [
        one
        for one in find_layers(model).found
        if isinstance(one.mechanism, PrimalAttention) and one.mechanism.decay is None
    ]
    stats = {layer.name: RunningStats() for layer in layers}
    for layer, captured in capture(model, data, layers):
        assert isinstance(captured, CapturedPrimal)
        for sequence in captured.sequences():
            stats[layer.name].add(torch.stack(heads_of(sequence), dim=1))
    results = tuple(
        LayerDuality(
            layer.name,
            layer.mechanism.weights,
            layer.mechanism.num_directions,
            *stats[layer.name].columns(),
        )
        for layer in layers
        if stats[layer.name].count and isinstance(layer.mechanism, PrimalAttention)
    )
    if not results:
        raise ValueError(f"data: no Primal layer of {type(model).__name__} saw a real token")
    return Duality(type(model).__name__, results)


@torch.no_grad()
def heads_of(sequence: PrimalSequence) -> HeadDuality:
    """Measure all heads of a layer on one sequence at once."""
    explained = explained_energy(sequence.kernel().singular_values())  # [H, L]
    best = explained[:, min(sequence.w_e.shape[-1], explained.shape[-1]) - 1]
    tensors = (*sequence[:5], *(sequence.h or (None, None)), sequence.lambda_diag)
    in_dims = tuple(None if each is None else 0 for each in tensors)
    kkt, objective, relative, e, r = torch.vmap(_one_head, in_dims)(*tensors)
    return HeadDuality(kkt, objective, relative, *_energies(sequence, ksvd.Scores(e, r)), best)


def _one_head(
    phi_q: Tensor,
    phi_k: Tensor,
    f_x: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    h_e: Tensor | None,
    h_r: Tensor | None,
    lambda_diag: Tensor,
) -> tuple[Tensor, ...]:
    """The largest KKT residual, J, relative J, and the scores."""
    scores = ksvd.primal_scores(phi_q, phi_k, *ksvd.weights_given_x(w_e, w_r, f_x))
    if h_e is None or h_r is None:
        h_e, h_r, scale = scores.e * lambda_diag, scores.r * lambda_diag, lambda_diag
    else:
        N, T = len(phi_q), len(phi_k)
        h_e, h_r = h_e / N, h_r / T
        scale = lambda_diag * (1 / N + 1 / T) / 2  # J averages e over queries, r over keys
    point = ksvd.KSVDPoint(w_e, w_r, *scores, h_e, h_r, scale)
    objective = ksvd.ksvd_objective(scores, w_e, w_r, scale)
    trace = (w_e * w_r).sum()
    size = (objective + trace).abs() + trace.abs()
    relative = torch.where(size > 0, objective.abs() / size, 0.0)
    kkt = ksvd.kkt_distances(point, phi_q, phi_k, f_x).amax()
    return kkt, objective, relative, *scores


def _energies(sequence: PrimalSequence, scores: ksvd.Scores) -> tuple[Tensor, Tensor]:
    r"""Find what $E \Lambda R^\top$ explains of K, and what the spans of E and R could, [H] each.

    The second is $|Q_E^\top K Q_R|^2 / |K|^2$ with orthonormal bases of the spans, the most that
    any matrix in the place of Lambda explains. K is never formed.
    """
    kernel = sequence.kernel()
    energy = kernel.norms() ** 2
    missing = kernel.minus(scores.e * sequence.lambda_diag[:, None], scores.r).norms() ** 2
    assert kernel.right is not None
    core = (_basis(scores.e).mT @ kernel.left) @ (kernel.right.mT @ _basis(scores.r))
    spanned = core.square().sum((-2, -1))
    return (
        torch.where(energy > 0, 1 - missing / energy, 1.0),
        torch.where(energy > 0, spanned / energy, 1.0),
    )


def _basis(columns: Tensor) -> Tensor:
    """Orthonormal bases of the spans [H, N, at most S]; directions of noise are 0."""
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    noise = torch.finfo(columns.dtype).eps * max(columns.shape[-2:])
    basis: Tensor = left * (values > noise * values[:, :1])[:, None]
    return basis
