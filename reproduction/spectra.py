"""Train the recipes of studies and measure the spectra of their attention, layer by layer.

    python reproduction/spectra.py primal_attention/ablations/objective --runs runs/ablations

Beside results.csv, spectra.csv has one row a run and layer: of the attention or kernel matrices on
16 test cases, evenly spaced, and for Primal layers how far they are from the KSVD of their kernel.
The columns are those of docs/analysis.md. With --curves, curves.csv has the explained variance of
up to 64 directions.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from measuring import Numbers, Trained, main, parse_arguments
from torch import Tensor

from primal_attention.analysis import duality, spectrum
from primal_attention.analysis.duality import LayerDuality
from primal_attention.analysis.spectrum import LayerSpectrum, Spectrum
from primal_attention.attention.primal import PrimalAttention

LAYERS, CURVES = "spectra.csv", "curves.csv"
CASES, BATCH, DIRECTIONS = 16, 8, 64
EMPTY = dict.fromkeys(("explained", "subspaces", "best", "kkt", "relative_objective"), "")


def measure(trained: Trained, *, with_curves: bool) -> dict[str, list[Numbers]]:
    """One row a layer, and where wanted one a layer and direction."""
    found = spectrum(trained.model, batches(trained))
    primal = any(isinstance(layer, PrimalAttention) for layer in trained.model.modules())
    distances = duality(trained.model, batches(trained)).layers if primal else ()
    by_name = {each.name: distance(each) for each in distances}
    rows = [
        {"layer": index, **of_matrices(each), **by_name.get(each.name, EMPTY)}
        for index, each in enumerate(found.layers)
    ]
    return {LAYERS: rows, CURVES: curves(found)} if with_curves else {LAYERS: rows}


def of_matrices(layer: LayerSpectrum) -> Numbers:
    return {
        "attention": layer.attention,
        "tokens": layer.num_tokens.mean,
        "directions_90": layer.directions.mean,
        "directions_99": float(layer.num_directions(0.99)),
        "effective_rank": layer.effective_rank.mean,
        "entropy": layer.entropy.mean,
        "asymmetry": layer.asymmetry.mean,
        "redundancy": layer.redundancy.mean,
    }


def distance(layer: LayerDuality) -> Numbers:
    return {name: getattr(layer, name).mean for name in EMPTY}


def curves(found: Spectrum) -> list[Numbers]:
    return [
        {
            "layer": index,
            "attention": layer.attention,
            "direction": direction,
            "explained": float(layer.explained[direction - 1]),
            "deviation": float(layer.explained_deviation[direction - 1]),
        }
        for index, layer in enumerate(found.layers)
        for direction in range(1, min(DIRECTIONS, len(layer.explained)) + 1)
    ]


def batches(trained: Trained) -> Iterator[Mapping[str, Tensor]]:
    """Test cases of all classes, a few at a time."""
    cases = trained.task.test
    chosen = torch.linspace(0, len(cases) - 1, min(CASES, len(cases))).long()
    for indices in chosen.split(BATCH):
        yield cases[indices].inputs


if __name__ == "__main__":
    arguments = parse_arguments(str(__doc__), "--curves")
    file = CURVES if arguments.curves else LAYERS
    main(partial(measure, with_curves=arguments.curves), file, arguments)
