r"""How far a Primal layer is from the KSVD that it stands for.

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

from primal_attention.analysis.layers import find_layers
from primal_attention.analysis.matrices import frobenius, triangle
from primal_attention.analysis.measures import explained_energy
from primal_attention.analysis.passes import Data, passes
from primal_attention.analysis.primal_runs import PrimalRun, PrimalSequence
from primal_attention.analysis.running import Running, Spread
from primal_attention.analysis.text import aligned
from primal_attention.attention.primal import PrimalAttention
from primal_attention.theory.ksvd import (
    KKTResiduals,
    KSVDPoint,
    Scores,
    kkt_residuals,
    ksvd_objective,
    primal_scores,
    weights_given_x,
)


class HeadDuality(NamedTuple):
    """One head on one sequence."""

    kkt: KKTResiduals  # relative errors of eq. (14), each at most 2
    objective: float  # J of eq. (11); averaged over tokens for dual weights
    relative_objective: float  # |J| over the sum of the sizes of its terms, in [0, 1]
    explained: float  # 1 - |K - E Lambda R^T|^2 / |K|^2; below 0 where worse than nothing
    subspaces: float  # the same with the best matrix in the place of Lambda, in [0, 1]
    best: float  # the most that so many directions can explain


@dataclass(frozen=True)
class LayerDuality:
    """One layer; means and deviations over heads and sequences."""

    name: str
    weights: str  # static, sampled or dual
    num_directions: int
    kkt: Spread  # the largest of the six relative errors
    objective: Spread
    relative_objective: Spread
    explained: Spread
    subspaces: Spread
    best: Spread


@dataclass(frozen=True)
class Duality:
    """The Primal layers of a model; print it."""

    model: str
    layers: tuple[LayerDuality, ...]

    def __str__(self) -> str:
        head = ("layer", "weights", "directions", "KKT", "J", "relative J")
        last = ("explained", "by subspaces", "best possible")
        rows = [(*head, *last), *map(_row, self.layers)]
        title = f"{self.model}: {len(self.layers)} Primal layers against the KSVD of their kernels"
        return "\n".join([title, *(f"  {line}" for line in aligned(rows))])


def duality(model: nn.Module, data: Data) -> Duality:
    """Measure every Primal layer of a model against the KSVD of its kernel on the data.

    Args:
        model: A model with Primal layers, or such a layer.
        data: As for :func:`~primal_attention.analysis.spectrum`.
    """
    found = [one for one in find_layers(model).found if isinstance(one.mechanism, PrimalAttention)]
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no Primal layer")
    layers = [one for one in found if one.mechanism.decay is None]
    if not layers:
        raise ValueError(
            f"model: all Primal layers of {type(model).__name__} have a decay, whose weights are "
            f"another matrix at each token; there is no KKT residual of them"
        )
    kept = {layer.name: Running() for layer in layers}
    for layer, run in passes(model, data, layers):
        assert isinstance(run, PrimalRun)
        for sequence in run.sequences():
            kept[layer.name].add(torch.tensor([_numbers(one) for one in heads_of(sequence)]))
    measured = [(layer, kept[layer.name]) for layer in layers if kept[layer.name].count]
    if not measured:
        raise ValueError(f"data: no Primal layer of {type(model).__name__} saw a real token")
    return Duality(
        type(model).__name__,
        tuple(_result(one.name, one.mechanism, numbers) for one, numbers in measured),
    )


def heads_of(sequence: PrimalSequence) -> list[HeadDuality]:
    """Every head of a layer on one sequence."""
    explained = explained_energy(sequence.kernel().singular_values())  # [H, L]
    S = min(sequence.w_e.shape[-1], explained.shape[-1])
    best = explained[:, S - 1].tolist()
    return [_head(_of_head(sequence, head), most) for head, most in enumerate(best)]


def point_of(sequence: PrimalSequence) -> KSVDPoint:
    """The variables of the Lagrangian (13) as one head, [N, P] and so on, has them."""
    phi_q, phi_k, f_x, w_e, w_r, h, lambda_diag, _ = sequence
    scores = primal_scores(phi_q, phi_k, *weights_given_x(w_e, w_r, f_x))
    if h is None:
        dual = scores.e * lambda_diag, scores.r * lambda_diag
        return KSVDPoint(w_e, w_r, *scores, *dual, lambda_diag)
    (h_e, h_r), N, T = h, len(phi_q), len(phi_k)
    mean = (1 / N + 1 / T) / 2  # J averages e over the queries and r over the keys
    return KSVDPoint(w_e, w_r, *scores, h_e / N, h_r / T, lambda_diag * mean)


def _of_head(sequence: PrimalSequence, head: int) -> PrimalSequence:
    h = None if sequence.h is None else (sequence.h[0][head], sequence.h[1][head])
    phi_q, phi_k, f_x, w_e, w_r, _, lambda_diag, _ = (
        None if one is None or isinstance(one, tuple) else one[head] for one in sequence
    )
    return PrimalSequence(phi_q, phi_k, f_x, w_e, w_r, h, lambda_diag)  # type: ignore[arg-type]


def _head(sequence: PrimalSequence, best: float) -> HeadDuality:
    point = point_of(sequence)
    scores = Scores(point.e_scores, point.r_scores)
    objective = ksvd_objective(scores, point.w_e, point.w_r, point.lambda_diag)
    trace = (point.w_e * point.w_r).sum()
    size = float((objective + trace).abs() + trace.abs())
    explained, subspaces = _energies(sequence, scores)
    return HeadDuality(
        kkt_residuals(point, sequence.phi_q, sequence.phi_k, sequence.f_x),
        float(objective),
        abs(float(objective)) / size if size > 0 else 0.0,
        explained,
        subspaces,
        best,
    )


def _energies(sequence: PrimalSequence, scores: Scores) -> tuple[float, float]:
    r"""What $E \Lambda R^\top$ explains of K, and what the spans of E and R could.

    The second is $|Q_E^\top K Q_R|^2 / |K|^2$ with orthonormal bases of the spans, the most that
    any matrix in the place of Lambda explains. K is never formed.
    """
    left, right = _factors(sequence)
    e, r = scores.e * sequence.lambda_diag, scores.r
    energy = _norm(left, right) ** 2
    if energy == 0:
        return 1.0, 1.0
    missing = _norm(torch.cat([left, -e], -1), torch.cat([right, r], -1)) ** 2
    core = (_basis(scores.e).mT @ left) @ (right.mT @ _basis(r))
    return 1 - missing / energy, float(core.square().sum()) / energy


def _factors(sequence: PrimalSequence) -> tuple[Tensor, Tensor]:
    kernel = sequence._replace(
        phi_q=sequence.phi_q[None],
        phi_k=sequence.phi_k[None],
        f_x=None if sequence.f_x is None else sequence.f_x[None],
    ).factors()
    return kernel.left[0], kernel.right[0]


def _norm(left: Tensor, right: Tensor) -> float:
    """|L R^T| through the QR factors of both."""
    return float(frobenius(triangle(left) @ triangle(right).mT))


def _basis(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span, [N, at most S]."""
    left: Tensor
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    noise = torch.finfo(columns.dtype).eps * max(columns.shape)
    return left[:, values > noise * values[0]]


def _numbers(head: HeadDuality) -> list[float]:
    return [head.kkt.max, *head[1:]]


def _result(name: str, layer: object, numbers: Running) -> LayerDuality:
    assert isinstance(layer, PrimalAttention)
    pairs = zip(numbers.mean.tolist(), numbers.deviation.tolist(), strict=True)
    spreads = [Spread(*pair) for pair in pairs]
    return LayerDuality(name, layer.weights, layer.num_directions, *spreads)


def _row(layer: LayerDuality) -> tuple[str, ...]:
    spreads = (
        layer.kkt,
        layer.objective,
        layer.relative_objective,
        layer.explained,
        layer.subspaces,
        layer.best,
    )
    return layer.name, layer.weights, str(layer.num_directions), *map(str, spreads)
