"""`primal predict`: the classes of new time series."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from primal_attention.array_files import read_array
from primal_attention.atomic_files import csv_text, write_text
from primal_attention.cli.arguments import naming
from primal_attention.foreign_files import reading
from primal_attention.tasks import Series, SeriesEncoding
from primal_attention.tasks.ts_files import read_ts
from primal_attention.training.model_factory import Trained, load_trained

_BATCH_SIZE = 64


def predict(
    file: Annotated[
        Path,
        typer.Argument(help="Series as .ts, or as .npy \\[cases, channels, length]."),
    ],
    checkpoint: Annotated[Path, typer.Option(help="A best.safetensors, or its directory.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("predictions.csv"),
) -> None:
    """Write the class and the probability of each class of every case in a file."""
    with naming("--checkpoint"):
        trained = load_trained(checkpoint)
        encoding = _encoding(trained)
    with naming("FILE"):
        series = read_series(file)
    with naming("--out"):
        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"{out} must be a file in a folder that exists")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    probabilities = torch.cat(list(_probabilities(trained, encoding, file, series, console)))
    with naming("--out"):
        write_text(out, _to_csv(trained.labels, probabilities))
    console.print(f"{out}: {len(probabilities)} cases, {len(trained.labels)} classes")


def _encoding(trained: Trained) -> SeriesEncoding:
    if trained.encoding is None:
        raise ValueError(
            f"a model of {trained.recipe.task} reads no time series; primal evaluate measures it"
        )
    return trained.encoding


def read_series(path: Path) -> Series:
    """Read the series of a file; labels are ignored."""
    if path.suffix == ".npy":
        remedy = "write it with numpy.save, as an array of numbers [cases, channels, length]"
        with reading(path, "a whole .npy file of series", remedy):
            array = read_array(path)
        if array.ndim != 3 or array.dtype.kind not in "iuf" or not len(array):
            raise ValueError(
                f"{path} must hold numbers [cases, channels, length], got shape {array.shape} "
                f"of {array.dtype}"
            )
        return list(array)
    if path.suffix != ".ts":
        raise ValueError(f"{path} must end in .ts or .npy, got {path.suffix!r}")
    return read_ts(path, labelled=False).series


def _probabilities(
    trained: Trained, encoding: SeriesEncoding, file: Path, series: Series, console: Any
) -> Iterator[Tensor]:
    """Yield the probabilities [B, classes] of a few cases at a time: padding takes memory."""
    starts = range(0, len(series), _BATCH_SIZE)
    for start in track(starts, "predicting", transient=True, console=console):
        with naming("FILE"), reading(file, "a file for this model", "give one of such series"):
            batch = encoding.encode(series[start : start + _BATCH_SIZE], first=start)
        with torch.no_grad():
            yield trained.model(**batch).double().softmax(-1)


def _to_csv(labels: tuple[str, ...], probabilities: Tensor) -> str:
    names = [f"probability_{label}" for label in labels]
    rows = []
    for case, row in enumerate(probabilities.tolist()):
        best = max(range(len(row)), key=row.__getitem__)
        texts = (f"{each:.6f}" for each in row)
        rows.append({"case": case, "label": labels[best], **dict(zip(names, texts, strict=True))})
    return csv_text(["case", "label", *names], rows)
