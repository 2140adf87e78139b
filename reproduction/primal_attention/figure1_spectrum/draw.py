"""Draw Figure 1 from curves.csv: means over the seeds, bands over heads and test cases.

python reproduction/primal_attention/figure1_spectrum/draw.py
"""

import argparse
import csv
import math
from collections import defaultdict
from pathlib import Path

import torch

from primal_attention.analysis import Spectrum, plot_spectra
from primal_attention.analysis.plot_style import save_figure
from primal_attention.analysis.running_stats import MeanDeviation
from primal_attention.analysis.spectrum import LayerSpectrum

HERE = Path(__file__).parent
OBJECTIVES = {"released": "released", "zero": "J²", "explained_energy": "explained energy"}
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--curves", type=Path, default=HERE / "curves.csv")
    parser.add_argument("--out", type=Path, default=HERE / "figure1.png")
    arguments = parser.parse_args()
    with arguments.curves.open(newline="") as file:
        rows = list(csv.DictReader(file))
    save_figure(plot_spectra(spectra(rows)), arguments.out)


def model_of(row: Row) -> str:
    """Name a model as the figure does."""
    settings = dict(each.partition("=")[::2] for each in row["settings"].split())
    if row["model"] == "softmax":
        return "softmax"
    if "eta" not in settings:
        return "Primal.+, no objective"
    return f"Primal.+, {OBJECTIVES[settings.get('objective', 'released')]}"


def spectra(rows: list[Row]) -> dict[str, Spectrum]:
    """Each model with the means of its runs."""
    models: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        models[model_of(row)][int(row["layer"])].append(row)
    return {
        name: Spectrum(name, tuple(layer(layers[index]) for index in sorted(layers)), {})
        for name, layers in sorted(models.items(), key=lambda each: each[0] != "softmax")
    }


def layer(rows: list[Row]) -> LayerSpectrum:
    """The curves of a layer; nothing else is known of it here."""
    explained, deviation = (curve(rows, name) for name in ("explained", "deviation"))
    unknown = MeanDeviation(math.nan, math.nan)
    curves = torch.full_like(explained, math.nan), explained, deviation
    first = rows[0]["layer"], rows[0]["attention"], 0, 0, unknown
    return LayerSpectrum(*first, *curves, *[unknown] * 5)


def curve(rows: list[Row], name: str) -> torch.Tensor:
    """The mean over the runs of each direction."""
    values: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        values[int(row["direction"])].append(float(row[name]))
    return torch.tensor([sum(values[i]) / len(values[i]) for i in sorted(values)])


if __name__ == "__main__":
    main()
