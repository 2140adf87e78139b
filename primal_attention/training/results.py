"""Results: one row a run in a CSV file, with all that it takes to run it again; means of rows."""

import csv
import io
import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch

from primal_attention.atomic_files import csv_text, holding, write_text
from primal_attention.foreign_files import UnreadableFileError
from primal_attention.training.outcome import Outcome
from primal_attention.training.recipe import Recipe

Row = dict[str, str]
COLUMNS = (
    *("dataset", "model", "protocol", "seed"),
    *("metric", "value", "valid", "selection", "epoch", "steps", "seconds"),
    *("device", "torch", "commit", "settings"),
)
_PATIENCE = 30.0  # seconds to wait for another process, which adds its rows in less
KEY = ("dataset", "model", "protocol", "seed", "settings")
CONFIDENCE = 0.95
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def row_of(outcome: Outcome, commit: str) -> Row:
    """Make the row of a run."""
    recipe = outcome.recipe
    on_test = recipe.data.valid_fraction is None
    return {
        **key_of(recipe),
        "metric": outcome.metric,
        "value": f"{outcome.value:.4f}",
        "valid": f"{outcome.valid:.4f}",
        "selection": "best test epoch" if on_test else "best validation epoch",
        "epoch": f"{outcome.rounds[outcome.best]['epoch']}",
        "steps": f"{outcome.steps}",
        "seconds": f"{outcome.seconds:.1f}",
        "device": outcome.device,
        "torch": torch.__version__,
        "commit": commit,
    }


def key_of(recipe: Recipe) -> Row:
    """Return the columns that identify a run."""
    return {
        "dataset": recipe.set_name,
        "model": recipe.model.name,
        "protocol": recipe.run.protocol,
        "seed": str(recipe.run.seed),
        "settings": settings_of(recipe),
    }


def settings_of(recipe: Recipe) -> str:
    """List the settings that differ from the defaults of a recipe, as ``--set`` reads them."""
    plain = Recipe(recipe.task, recipe.model.name).flat()
    named = ("task", "model", "protocol", "seed", "attention")
    changed = {
        name: value
        for name, value in recipe.flat().items()
        if name not in named and value != plain[name]
    }
    changed |= {f"attention.{name}": value for name, value in recipe.model.attention.items()}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in changed.items()
    }
    return " ".join(f"{name}={text}" for name, text in sorted(texts.items()))


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a results file; none where there is no file.

    Raises:
        UnreadableFileError: It is damaged, for instance cut off within a row.
    """
    return read_table(path, COLUMNS)[1] if path.exists() else []


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a results file, which is made where there is none.

    A row of the same run is replaced. Columns that the file or the rows have beside ``COLUMNS``
    come after those.

    Raises:
        HeldError: Another process has been writing to it for long.
        UnreadableFileError: It is damaged; it stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with holding(path, wait=_PATIENCE):
        before, known = read_table(path, COLUMNS) if path.exists() else ([], [])
        key = (*KEY, "selection")  # a run may have a row for each of its checkpoints
        merged = {tuple(row[name] for name in key): row for row in [*known, *rows]}
        ordered = sorted(merged.values(), key=_order)
        columns = dict.fromkeys((*COLUMNS, *before, *(name for row in ordered for name in row)))
        write_text(path, csv_text(columns, ordered))


def read_table(path: Path, needed: Iterable[str]) -> tuple[list[str], list[Row]]:
    """Read columns and rows. Each row ends in a new line, so that no part of one counts."""
    try:
        text = path.read_bytes().decode("utf-8")
        if not text.endswith("\n"):
            last = text.count("\n") + 1
            raise ValueError(f"line {last} has no end: the file was cut off")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        columns = next(reader)
        missing = set(needed) - set(columns)
        if missing:
            raise ValueError(f"it lacks the columns {', '.join(sorted(missing))}")
        return columns, [_row(columns, cells, reader.line_num) for cells in reader if cells]
    except (ValueError, csv.Error) as error:
        raise UnreadableFileError(
            f"{path} is no whole file of results: {error}; mend or remove that line, or take a "
            "copy of the file"
        ) from error


def _row(columns: list[str], cells: list[str], line: int) -> Row:
    if len(cells) != len(columns):
        raise ValueError(f"line {line} has {len(cells)} cells, there are {len(columns)} columns")
    row = dict(zip(columns, cells, strict=True))
    if not row.get("seed", "0").isdecimal():
        raise ValueError(f"the seed in line {line} must be a number, got {row['seed']!r}")
    return row


def _order(row: Mapping[str, str]) -> tuple[str | int, ...]:
    names = ("dataset", "model", "protocol", "settings")
    return (*(row[name] for name in names), int(row["seed"]))


def current_commit() -> str:
    """Return the commit of the working directory, or PRIMAL_COMMIT where that is set."""
    if "PRIMAL_COMMIT" in os.environ:
        return os.environ["PRIMAL_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


class Estimate(NamedTuple):
    """A mean over seeds with its confidence interval, mean ± margin."""

    mean: float
    margin: float | None  # none from a single seed
    seeds: int
    variance: float | None  # of the mean
    freedom: float | None  # degrees of freedom of that variance

    def __str__(self) -> str:
        margin = "" if self.margin is None else f" ± {self.margin:.1f}"
        return f"{self.mean:.1f}{margin} ({self.seeds})"


def estimate(values: Sequence[float]) -> Estimate:
    """Average runs that differ in the seed, with the interval of Student's t."""
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), None, count, None, None)
    variance = stdev(values) ** 2 / count
    return _estimate(fmean(values), count, variance, count - 1)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Average several estimates, each from runs of its own (Welch and Satterthwaite)."""
    mean, seeds = fmean(each.mean for each in estimates), min(each.seeds for each in estimates)
    known = [(v, f) for *_, v, f in estimates if v is not None and f is not None]
    if len(known) < len(estimates):
        return Estimate(mean, None, seeds, None, None)
    total = sum(variance for variance, _ in known)
    spread = sum(variance**2 / freedom for variance, freedom in known)
    freedom = total**2 / spread if spread else 1.0
    return _estimate(mean, seeds, total / len(known) ** 2, freedom)


def _estimate(mean: float, seeds: int, variance: float, freedom: float) -> Estimate:
    margin = t_quantile(freedom) * math.sqrt(variance)
    return Estimate(mean, margin, seeds, variance, freedom)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    r"""Return the t with $P(|T| \le t)$ equal to the confidence.

    With $t = \sqrt{\nu} \tan\theta$ that probability is an integral of $\cos^{\nu-1}$ from 0 to
    $\theta$; the angle is found by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = _probability(middle, freedom) < confidence
        low, high = (middle, high) if below else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: float) -> float:
    values = np.cos(angle / 2 * (_NODES + 1)) ** (freedom - 1)
    integral = angle / 2 * float(_WEIGHTS @ values)
    log_constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return 2 * integral * math.exp(log_constant) / math.sqrt(math.pi)
