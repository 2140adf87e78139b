"""Decompose a real asymmetric kernel from both sides, and check that the two sides agree.

The points are the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels each. A query is
the left half of an image and a key is the right half of one, mirrored, so that the kernel asks how
far the left half of image i is the mirror image of the right half of image j. That is not what it
asks of j and i: the kernel matrix is not symmetric.

The first table solves the dual (a singular value decomposition), goes over to the primal weights
and compares the scores, on the images of the solution and on new ones. The second table minimises
two objectives on one of these kernels and says how much of the kernel each of them explains.

    python examples/kernel_svd_of_digits.py --out out/kernel_svd_of_digits.png
"""

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

from primal_attention.analysis.plot_style import PALETTE
from primal_attention.atomic_files import replacing
from primal_attention.theory import Cosine, Polynomial
from primal_attention.theory.ksvd import (
    KSVDPoint,
    Scores,
    best_unexplained_energy,
    dual_scores,
    induced_kernel_matrix,
    kkt_residuals,
    ksvd_objective,
    primal_scores,
    stationary_point,
    svd_of_scores,
    unexplained_energy,
    weights_given_x,
)

NUM_FITTED = 700  # the other images are new to the solution
NUM_DIRECTIONS = 10
SAMPLES_PER_DIRECTION = 10  # landmarks of f(X), as in the paper
NUM_STEPS = 1000


class Digits(NamedTuple):
    """The two halves of every image, centred, and what it shows."""

    left: Tensor  # [N, 32]
    right: Tensor  # [N, 32], mirrored
    labels: Tensor  # [N]


class Case(NamedTuple):
    """A kernel given by its features, and its decomposition on the first NUM_FITTED images."""

    name: str
    phi_q: Tensor  # [N, P]
    phi_k: Tensor  # [N, P]
    f_x: Tensor | None  # [M, P]
    point: KSVDPoint
    scores: Scores  # of all images, from the primal weights
    spectrum: Tensor  # all singular values


class Descent(NamedTuple):
    """Result of minimising one objective."""

    name: str
    unexplained: list[float]  # before every step and after the last
    objective: float  # J
    spectrum_error: float  # largest relative error of the leading singular values


def load_halves() -> Digits:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64) / 16  # [N, 8, 8]
    images = images - images.mean(0)
    left, right = images[:, :, :4], images[:, :, 4:].flip(2)
    return Digits(left.flatten(1), right.flatten(1), torch.tensor(digits.target))


def landmarks(points: Tensor) -> Tensor:
    """Evenly spaced rows, first and last included: the paper's f(X) as released."""
    num_landmarks = min(NUM_DIRECTIONS * SAMPLES_PER_DIRECTION, len(points))
    return points[torch.arange(num_landmarks) * (len(points) - 1) // (num_landmarks - 1)]


def decompose(name: str, phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None) -> Case:
    fitted_q, fitted_k = phi_q[:NUM_FITTED], phi_k[:NUM_FITTED]
    point = stationary_point(fitted_q, fitted_k, NUM_DIRECTIONS, f_x)
    scores = primal_scores(phi_q, phi_k, *weights_given_x(point.w_e, point.w_r, f_x))
    spectrum = torch.linalg.svdvals(induced_kernel_matrix(fitted_q, fitted_k, f_x))
    return Case(name, phi_q, phi_k, f_x, point, scores, spectrum)


def all_cases(digits: Digits) -> list[Case]:
    cases = []
    for kernel in (Cosine(), Polynomial(degree=2, gamma=1.0)):
        name = type(kernel).__name__.lower()
        phi_q, phi_k = kernel.features(digits.left), kernel.features(digits.right)
        cases.append(decompose(f"{name}, F = I", phi_q, phi_k, None))
        # f(X) is linear in X for the cosine kernel, as in the paper, and made of its features
        # for the polynomial one, whose feature space is larger.
        samples = landmarks(digits.left[:NUM_FITTED])
        f_x = samples if isinstance(kernel, Cosine) else kernel.features(samples)
        cases.append(decompose(f"{name}, F = landmarks", phi_q, phi_k, f_x))
    return cases


def duality_row(case: Case) -> list[str]:
    """The numbers of one case; primal and dual scores are compared on all images."""
    _, phi_q, phi_k, f_x, point, primal, spectrum = case
    fitted_q, fitted_k = phi_q[:NUM_FITTED], phi_k[:NUM_FITTED]
    kernel_of_queries = induced_kernel_matrix(phi_q, fitted_k, f_x)
    kernel_of_keys = induced_kernel_matrix(fitted_q, phi_k, f_x)
    dual = dual_scores(kernel_of_queries, kernel_of_keys, point.h_e, point.h_r)
    fitted = Scores(point.e_scores, point.r_scores)
    objective = ksvd_objective(fitted, point.w_e, point.w_r, point.lambda_diag)
    grams = (fitted_q.T @ fitted_q, fitted_k.T @ fitted_k)
    weights = weights_given_x(point.w_e, point.w_r, f_x)
    unexplained = unexplained_energy(*grams, *weights, point.lambda_diag, f_x)
    return [
        case.name,
        str(NUM_FITTED),
        str(phi_q.shape[1]),
        str(NUM_DIRECTIONS),
        f"{spectrum[0]:.1f}",
        f"{(primal.e - dual.e).abs().max():.1e}",
        f"{(primal.r - dual.r).abs().max():.1e}",
        f"{objective:.1e}",
        f"{kkt_residuals(point, fitted_q, fitted_k, f_x).max:.1e}",
        f"{unexplained:.6f}",
        f"{best_unexplained_energy(spectrum, NUM_DIRECTIONS):.6f}",
    ]


def descend(name: str, case: Case) -> Descent:
    """Minimise J^2 or the unexplained energy of a data-independent case with Adam."""
    # Both objectives see the features through their Gram matrices alone, so the triangular
    # factors of the features, [P, P], do in place of the features, [N, P].
    phi_q = torch.linalg.qr(case.phi_q[:NUM_FITTED]).R
    phi_k = torch.linalg.qr(case.phi_k[:NUM_FITTED]).R
    gram_q, gram_k = phi_q.T @ phi_q, phi_k.T @ phi_k
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, len(gram_q), NUM_DIRECTIONS, generator=generator, dtype=phi_q.dtype)
    weights = torch.linalg.qr(start).Q.requires_grad_()  # [2, P, S]
    raw_lambda = torch.zeros(NUM_DIRECTIONS, dtype=phi_q.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([weights, raw_lambda], lr=2e-2)

    def measure() -> tuple[Tensor, Tensor]:
        w_e, w_r = weights
        scores = primal_scores(phi_q, phi_k, w_e, w_r)
        objective = ksvd_objective(scores, w_e, w_r, raw_lambda.exp())
        return objective, unexplained_energy(gram_q, gram_k, w_e, w_r, raw_lambda.exp())

    history = []
    for _ in range(NUM_STEPS):
        objective, unexplained = measure()
        history.append(unexplained.item())
        optimizer.zero_grad()
        (objective.square() if name == "J^2" else unexplained).backward()
        optimizer.step()
    with torch.no_grad():
        objective, unexplained = measure()
        found = svd_of_scores(primal_scores(phi_q, phi_k, *weights), raw_lambda.exp())
    true = case.spectrum[:NUM_DIRECTIONS]
    error = ((found.singular_values - true) / true).abs().max()
    return Descent(name, [*history, unexplained.item()], objective.item(), error.item())


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(row[0].ljust(widths[0]), *numbers, sep="  ")


def draw_spectra(spectrum: Axes, explained: Axes, cases: list[Case]) -> None:
    styles = product((PALETTE["blue"], PALETTE["vermilion"]), ("-", "--"))
    shown = 40
    for case, (color, style) in zip(cases, styles, strict=True):
        index = torch.arange(1, shown + 1)
        values = case.spectrum[:shown] / case.spectrum[0]
        values = torch.where(values > 1e-12, values, torch.nan)
        energy = case.spectrum.square().cumsum(0) / case.spectrum.square().sum()
        spectrum.semilogy(index, values, style, color=color, label=case.name)
        explained.plot(index, energy[:shown], style, color=color, label=case.name)
    for axes in (spectrum, explained):
        axes.axvline(NUM_DIRECTIONS, color="0.6", linewidth=1, linestyle=":")
        axes.set_xlabel(f"direction (dotted: s = {NUM_DIRECTIONS})")
        axes.set_xlim(0, shown)
        axes.grid(alpha=0.25)
    spectrum.set_ylim(1e-4, 1.5)
    spectrum.set_title("Singular values, relative to the first")
    explained.set_title("Cumulative explained variance")
    explained.legend(loc="lower right", frameon=False)


def draw_descents(axes: Axes, descents: list[Descent], best: float) -> None:
    for descent, color in zip(descents, (PALETTE["orange"], PALETTE["green"]), strict=True):
        steps = range(1, len(descent.unexplained) + 1)
        label = f"minimising {descent.name.replace('J^2', '$J^2$')}"
        axes.semilogx(steps, descent.unexplained, color=color, linewidth=2, label=label)
    axes.axhline(best, color="black", linewidth=1, linestyle=":", label="best possible")
    axes.set_title("Unexplained energy along the steps of Adam")
    axes.set_xlabel("step")
    axes.set_xlim(1, NUM_STEPS)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right", frameon=False)


def spread(places: Tensor, distance: float) -> Tensor:
    """Push places apart, [any, 2], until none are nearer to each other than the distance."""
    for _ in range(100):
        gaps = places[:, None] - places
        lengths = gaps.norm(dim=2, keepdim=True)
        places = places + ((distance - lengths).clamp(min=0) * gaps / (lengths + 1e-9)).sum(1) / 3
    return places


def draw_scores(axes: Axes, scores: Tensor, labels: Tensor, title: str, letter: str) -> None:
    colors = mpl.colormaps["tab10"]
    axes.scatter(*scores[:, :2].T, c=colors(labels.numpy()), s=9, alpha=0.45, linewidths=0)
    middles = torch.stack([scores[labels == digit, :2].median(0).values for digit in range(10)])
    for digit, (x, y) in enumerate(spread(middles, 0.3 * scores[:, 0].std().item())):
        box = {"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": colors(digit)}
        axes.text(x, y, str(digit), ha="center", va="center", fontweight="bold", bbox=box)
    axes.set_title(title)
    axes.set_xlabel(f"${letter}_1$")
    axes.set_ylabel(f"${letter}_2$")
    axes.grid(alpha=0.25)


def draw_directions(cells: list[Axes], point: KSVDPoint) -> None:
    """Every direction as an image: its left half weighs the query, its right half the key."""
    for index, axes in enumerate(cells):
        left, right = (w[:, index].reshape(8, 4) for w in (point.w_e, point.w_r))
        image = torch.cat([left, right.flip(1)], dim=1)
        size = image.abs().max().item()
        axes.imshow(image.numpy(), cmap="RdBu_r", vmin=-size, vmax=size)
        axes.axvline(3.5, color="black", linewidth=0.8)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"direction {index + 1}", labelpad=3)


def draw(digits: Digits, cases: list[Case], descents: list[Descent]) -> Figure:
    shown = cases[0]
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.2), hspace=0.03)
    spectrum, explained, steps = top.subplots(1, 3)
    draw_spectra(spectrum, explained, cases)
    draw_descents(steps, descents, best_unexplained_energy(shown.spectrum, NUM_DIRECTIONS).item())
    left, middle, right = bottom.subfigures(1, 3)
    draw_scores(left.subplots(), shown.scores.e, digits.labels, "Scores of the left halves", "e")
    draw_scores(middle.subplots(), shown.scores.r, digits.labels, "Scores of the right halves", "r")
    right.suptitle("Weights of the leading directions: query | key", fontsize="large")
    draw_directions(list(right.subplots(2, 3).flat), shown.point)
    figure.suptitle(f"Kernel SVD of digit halves (lower row: {shown.name})", fontsize="x-large")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    picture = Path("out/kernel_svd_of_digits.png")
    parser.add_argument("--out", type=Path, default=picture, help="the picture to write, a PNG")
    path = parser.parse_args().out
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    digits = load_halves()
    cases = all_cases(digits)
    print(f"Kernel SVD of N images; primal and dual scores e, r of all {len(digits.labels)}\n")
    header = ["case", "N", "p", "s", "sigma_1", "max |de|", "max |dr|", "J", "KKT"]
    print_table([*header, "unexplained", "best possible"], [duality_row(case) for case in cases])
    descents = [descend(name, cases[0]) for name in ("J^2", "unexplained energy")]
    print(f"\nTwo objectives minimised on the first case, {NUM_STEPS} steps of Adam\n")
    rows = [
        [d.name, f"{d.objective**2:.1e}", f"{d.unexplained[-1]:.6f}", f"{d.spectrum_error:.1e}"]
        for d in descents
    ]
    print_table(["minimised", "J^2", "unexplained", "error of singular values"], rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        draw(digits, cases, descents).savefig(unfinished, format="png", dpi=130)
    print(f"\nWrote {path}")


if __name__ == "__main__":
    main()
