"""`primal spectrum`: what the attention of a trained model does."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from primal_attention.analysis import Spectrum, plot_spectra
from primal_attention.analysis import spectrum as measure_spectrum
from primal_attention.analysis.plot_style import save_figure
from primal_attention.analysis.spectrum import check_energy, curve_rows, layer_rows
from primal_attention.analysis.suggestion import suggestion_from
from primal_attention.atomic_files import write_rows
from primal_attention.cli.arguments import SPLITS, Checkpoint, Split, check_name, load_task, naming
from primal_attention.tasks import Cases
from primal_attention.training.model_factory import Trained, load_trained

PNG, LAYERS, CURVES = "spectrum.png", "spectrum.csv", "spectrum_curves.csv"
_BATCH_SIZE = 8


def spectrum(
    checkpoint: Checkpoint,
    data: Annotated[
        Path | None, typer.Argument(help="Folder of the data set; default: where it was.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint for the same data.")
    ] = None,
    split: Split = "valid",
    cases: Annotated[int, typer.Option(min=1, help="How many cases to look at.")] = 64,
    energy: Annotated[float, typer.Option(help="Share that directions are to explain.")] = 0.9,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Show spectra of the attention of a trained model; write a figure and tables."""
    with naming("--split"):
        check_name("split", split, SPLITS)
    with naming("--energy"):
        check_energy(energy)
    with naming("--out"):
        if not out.is_dir():
            raise ValueError(f"{out} must be a folder that exists")
    with naming("CHECKPOINT"):
        trained = [load_trained(checkpoint)]
    with naming("--against"):
        trained += [] if against is None else [_comparable(load_trained(against), trained[0])]
    task = load_task(trained[0].recipe, data)
    chosen: Cases = getattr(task, split)
    with naming("CHECKPOINT or DATA"):
        if trained[0].sizes != task.sizes:
            raise ValueError(f"{task.name} has {task.sizes}, not {trained[0].sizes}")
        spectra = _spectra(trained, chosen, cases)
        figure = plot_spectra(spectra)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, each in spectra.items():
        console.print(f"{name}\n\n{each}\n\n{suggestion_from(each, energy)}\n")
    save_figure(figure, out / PNG)
    write_rows(out / LAYERS, layer_rows(spectra))
    write_rows(out / CURVES, curve_rows(spectra))
    number = min(cases, len(chosen))
    written = ", ".join(str(out / name) for name in (PNG, LAYERS, CURVES))
    console.print(f"{number} {split} cases; wrote {written}")


def _comparable(other: Trained, first: Trained) -> Trained:
    if (other.recipe.task, other.sizes) != (first.recipe.task, first.sizes):
        raise ValueError(
            f"it was trained for {other.recipe.task} ({other.sizes}), the first checkpoint for "
            f"{first.recipe.task} ({first.sizes})"
        )
    return other


def _spectra(trained: list[Trained], cases: Cases, number: int) -> dict[str, Spectrum]:
    """By the names of the models, told apart by seeds where these are the same."""
    names = [each.recipe.model.name for each in trained]
    if len(set(names)) < len(names):
        names = [f"{each.recipe.model.name}, {place}" for place, each in enumerate(trained, 1)]
    return {
        name: measure_spectrum(each.model, _batches(cases, number))
        for name, each in zip(names, trained, strict=True)
    }


def _batches(cases: Cases, number: int) -> Iterator[Mapping[str, Tensor]]:
    indices = torch.arange(min(number, len(cases)))
    for start in range(0, len(indices), _BATCH_SIZE):
        yield cases[indices[start : start + _BATCH_SIZE]].inputs
