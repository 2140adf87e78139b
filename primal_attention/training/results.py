"""Results: one row a run in a CSV file, with all that it takes to run it again."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from primal_attention.training.loop import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.whole_files import write_text

Row = dict[str, str]
COLUMNS = (
    *("dataset", "model", "protocol", "seed"),
    *("metric", "value", "valid", "selection", "epoch", "steps", "seconds"),
    *("device", "torch", "commit", "settings"),
)
KEY = ("dataset", "model", "protocol", "seed", "settings")


def row_of(outcome: Outcome, commit: str) -> Row:
    """The row of a run."""
    recipe = outcome.recipe
    on_test = recipe.valid_fraction is None
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
    """The columns that say which run it is."""
    return {
        "dataset": recipe.task.partition("/")[2],
        "model": recipe.model,
        "protocol": recipe.protocol,
        "seed": str(recipe.seed),
        "settings": settings_of(recipe),
    }


def settings_of(recipe: Recipe) -> str:
    """Every setting that differs from the defaults of a recipe, as ``--set`` reads them."""
    plain = Recipe(recipe.task, recipe.model)
    named = ("task", "model", "protocol", "seed", "attention")
    changed = {
        each.name: getattr(recipe, each.name)
        for each in fields(recipe)
        if each.name not in named and getattr(recipe, each.name) != getattr(plain, each.name)
    }
    changed |= {f"attention.{name}": value for name, value in recipe.attention.items()}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in changed.items()
    }
    return " ".join(f"{name}={text}" for name, text in sorted(texts.items()))


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        missing = set(COLUMNS) - set(reader.fieldnames or ())
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}")
    return rows


def add_rows(path: Path, rows: Iterable[Row], *, more: Iterable[str] = ()) -> None:
    """Add rows to a results file; a row of the same run is replaced.

    Args:
        path: Of the file, which is made where there is none.
        rows: With all of ``COLUMNS``.
        more: Columns that they have beside those.
    """
    with _locked(path):
        key = (*KEY, "selection")  # a run may have a row for each of its checkpoints
        merged = {tuple(row[name] for name in key): row for row in [*read_rows(path), *rows]}
        text = io.StringIO()
        ordered = sorted(merged.values(), key=_order)
        writer = csv.DictWriter(text, [*COLUMNS, *more], lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)
        write_text(path, text.getvalue())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system has locks of files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def _order(row: Mapping[str, str]) -> tuple[str | int, ...]:
    names = ("dataset", "model", "protocol", "settings")
    return (*(row[name] for name in names), int(row["seed"]))


def current_commit() -> str:
    """The commit of the working directory; PRIMAL_COMMIT where there is no repository."""
    if "PRIMAL_COMMIT" in os.environ:
        return os.environ["PRIMAL_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
