"""Where the cases of a task come from: a prepared file, files as they are handed out, a generator.

``<Name>.npz`` in the folder comes first. A distribution may lie in the folder itself or in the
folder ``lra_release`` that the authors' archive unpacks to.
"""

import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from primal_attention.tasks.lra import image, listops_files, pathfinder_files, retrieval
from primal_attention.tasks.lra.cache import PartSizes, Prepared, read_prepared, write_prepared
from primal_attention.tasks.lra.chunks import Progress, no_progress
from primal_attention.tasks.lra.imdb import read_text
from primal_attention.tasks.lra.pathfinder_settings import PATHFINDERS
from primal_attention.tasks.lra.retrieval_imdb import read_retrieval_imdb

RELEASE = "the archive lra_release.gz of github.com/google-research/long-range-arena"
IMDB = "aclImdb_v1.tar.gz from ai.stanford.edu/~amaas/data/sentiment"
CIFAR = "cifar-10-binary.tar.gz or cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class Source:
    """How to come by the cases of a task."""

    places: tuple[str, ...]  # in the folder: the distribution, by the names it may have
    probe: str  # what is in it, to know it by
    origin: str  # where to get it
    read: Callable[..., Prepared]  # of its place, and of a seed where it draws
    generate: Callable[..., Prepared] | None = None
    draws: bool = False  # whether reading draws at random


def _pathfinder(name: str) -> Source:
    return Source(
        (pathfinder_files.released_folder(name),),
        "metadata",
        RELEASE,
        partial(pathfinder_files.read_pathfinder, name),
        partial(pathfinder_files.generate_pathfinder, name),
        draws=True,
    )


_PICTURES = (image.BINARY, image.PYTHON, image.GREY, f"cifar10/{image.GREY}")
SOURCES: dict[str, Source] = {
    "listops": Source(
        ("listops-1000", "."),
        listops_files.FILES[0],
        RELEASE,
        listops_files.read_listops,
        listops_files.generate_listops,
    ),
    "text": Source(("aclImdb", "."), "train/pos", IMDB, read_text),
    "retrieval": Source(("tsv_data", "."), retrieval.FILES[0], RELEASE, retrieval.read_retrieval),
    "retrieval-imdb": Source(
        ("aclImdb", "."), "train/urls_pos.txt", IMDB, read_retrieval_imdb, draws=True
    ),
    "image": Source(_PICTURES, "", CIFAR, image.read_image),
    **{name: _pathfinder(name) for name in PATHFINDERS},
}
LRA_TASKS = tuple(SOURCES)


def load_lra(name: str, folder: Path | None = None) -> Prepared:
    """The cases of a task, from a prepared file or else from files as they are handed out.

    Args:
        name: One of ``LRA_TASKS``.
        folder: Where to look; ``lra`` in the folder that the environment variable ``PRIMAL_DATA``
            names, and that folder itself, or in ``data``, unless told.
    """
    place = find_lra(name, folder)
    if place is None:
        raise FileNotFoundError(_what_to_do(name, lra_folders(folder)[0]))
    is_prepared = place.name == f"{name}.npz"
    return read_prepared(place, name) if is_prepared else _source(name).read(place)


def find_lra(name: str, folder: Path | None = None) -> Path | None:
    """Where ``load_lra`` would read a task from; None where it is not at hand."""
    _source(name)
    prepared = (each / f"{name}.npz" for each in lra_folders(folder))
    return next((path for path in prepared if path.is_file()), _distribution(name, folder))


def prepare_lra(
    name: str,
    folder: Path | None = None,
    out: Path | None = None,
    *,
    sizes: PartSizes | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Path:
    """Write a task to ``<out>/<name>.npz``: read from its files, or else generated.

    Generating goes on where it was interrupted. The result depends on the sizes and the seed alone.

    Args:
        name: One of ``LRA_TASKS``.
        folder: Where its files are, as for ``load_lra``; a prepared file there is not read.
        out: Where to write; the folder unless told.
        sizes: Cases of the parts, of what is generated; those of the benchmark unless told.
        seed: Of what is drawn at random.
        workers: Processes to generate with.
        progress: Called with chunks done and chunks in all.
    """
    source, place = _source(name), _distribution(name, folder)
    out = lra_folders(folder)[0] if out is None else Path(out)
    if place is not None:
        if sizes is not None:
            raise ValueError(f"sizes: {name!r} is read from {place} as it is, got {sizes}")
        prepared = source.read(place, seed=seed) if source.draws else source.read(place)
        write_prepared(out / f"{name}.npz", prepared)
    elif source.generate is not None:
        options = {"seed": seed} if sizes is None else {"seed": seed, "sizes": PartSizes(*sizes)}
        chunks = out / f".{name}.{_key(options)}.chunks"
        prepared = source.generate(chunks, **options, workers=workers, progress=progress)
        write_prepared(out / f"{name}.npz", prepared)
        shutil.rmtree(chunks)
    else:
        raise FileNotFoundError(_what_to_do(name, lra_folders(folder)[0]))
    return out / f"{name}.npz"


def lra_folders(folder: Path | None = None) -> list[Path]:
    """Where to look; prepared files are written to the first."""
    if folder is not None:
        return [Path(folder)]
    data = Path(os.environ.get("PRIMAL_DATA", "data"))
    return [data / "lra", data]


def _source(name: str) -> Source:
    if name not in SOURCES:
        near = difflib.get_close_matches(name, LRA_TASKS) or LRA_TASKS
        raise ValueError(f"name {name!r} is no task; did you mean one of {', '.join(near)}?")
    return SOURCES[name]


def _distribution(name: str, folder: Path | None) -> Path | None:
    """Where the files of a task lie as they are handed out."""
    source = _source(name)
    roots = [
        root / release
        for root in lra_folders(folder)
        for release in (".", "lra_release", "lra_release/lra_release")
    ]
    places = [root / place for root in roots for place in source.places]
    return next((place for place in places if (place / source.probe).exists()), None)


def _key(options: dict[str, Any]) -> str:
    """A name for what is made with these options."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def _what_to_do(name: str, folder: Path) -> str:
    source = _source(name)
    expected = " or ".join(str(Path(place) / source.probe) for place in source.places)
    message = f"{name}: no data in {folder}. Put {expected} there, from {source.origin}"
    if source.generate is not None:
        return f"{message}; or generate it with prepare_lra({name!r}, out={str(folder)!r})"
    return message + ("; or take 'retrieval-imdb'" if name == "retrieval" else "")
