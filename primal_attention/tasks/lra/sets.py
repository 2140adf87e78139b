"""Where the cases of a task come from: a prepared file, files as handed out, a generator.

``<name>.npz`` in the folder comes first: an uncompressed file with the tokens of all sequences,
which are mapped into memory, the target of each case, for tasks on pairs which two sequences a case
is about, and how all of it was made, with a checksum. A distribution may lie in the folder itself
or in the folder ``lra_release`` that the authors' archive unpacks to.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.array_files import ArrayFile
from primal_attention.tasks import reviews
from primal_attention.tasks.lra import cifar, listops, texts
from primal_attention.tasks.lra.chunks import made_in_chunks
from primal_attention.tasks.lra.pathfinder import PATHFINDERS, generate_pathfinder
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask
from primal_attention.tasks.prepared import PreparedSets, data_folders

RELEASE = "the archive lra_release.gz of github.com/google-research/long-range-arena"
CIFAR = "cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class CaseSource:
    """How to come by the cases of a task."""

    places: tuple[str, ...]  # in the folder: the distribution, by the names it may have
    probe: str  # what is in it, to know it by
    origin: str  # where to get it
    read: Callable[[Path], PreparedTask]


_PICTURES = (cifar.BINARY, cifar.GREY, f"cifar10/{cifar.GREY}")
_REVIEWS = (reviews.FOLDER, ".")
SOURCES: dict[str, CaseSource] = {
    "listops": CaseSource(
        ("listops-1000", "."),
        listops.FILES[0],
        RELEASE,
        listops.read_listops,
    ),
    "text": CaseSource(_REVIEWS, "train/pos", reviews.ORIGIN, texts.read_text),
    "retrieval": CaseSource(("tsv_data", "."), texts.PAIR_FILES[0], RELEASE, texts.read_retrieval),
    "retrieval-imdb": CaseSource(
        _REVIEWS, reviews.FILMS, reviews.ORIGIN, texts.read_retrieval_imdb
    ),
    "image": CaseSource(_PICTURES, "", CIFAR, cifar.read_image),
}
GENERATORS: dict[str, Callable[..., PreparedTask]] = {
    "listops": listops.generate_listops,
    **{name: partial(generate_pathfinder, name) for name in PATHFINDERS},
}
LRA_TASKS = (*SOURCES, *PATHFINDERS)


class Arena(PreparedSets[PreparedTask]):
    """The tasks of the arena; tokens stay in a prepared file until they are needed."""

    domain, format = "lra", "primal-attention lra, version 1"
    names, noun = LRA_TASKS, "task"

    def prepare(
        self,
        name: str,
        folder: Path | None = None,
        out: Path | None = None,
        *,
        sizes: PartSizes | None = None,
        seed: int = 0,
        workers: int = 1,
    ) -> Path:
        """Write a task to ``<out>/<name>.npz``: read from its files, or else generated.

        What is generated depends on sizes and seed alone.

        Args:
            name: One of ``LRA_TASKS``.
            folder: Where its files are, as for ``load_lra``; a prepared file there is not read.
            out: Where to write; the folder by default.
            sizes: Cases of the parts, of what is generated; by default those of the benchmark.
            seed: Of what is generated.
            workers: Processes to generate with.
        """
        self._check_name(name)
        path, place = self.target(name, folder, out), self._find_files(name, folder)
        if place is not None:
            if sizes is not None:
                raise ValueError(f"sizes: {name!r} is read from {place} as it is, got {sizes}")
            self.write(path, self._read_files(name, place))
        elif name in GENERATORS:
            options = {} if sizes is None else {"sizes": PartSizes(*sizes)}
            run = partial(made_in_chunks, workers=workers)
            self.write(path, GENERATORS[name](run, seed=seed, **options))
        else:
            raise FileNotFoundError(self._advice(name, folder))
        return path

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        if name not in SOURCES:
            return None
        source = SOURCES[name]
        roots = [
            root / release
            for root in data_folders(self.domain, folder)
            for release in (".", "lra_release", "lra_release/lra_release")
        ]
        places = [root / place for root in roots for place in source.places]
        return next((place for place in places if (place / source.probe).exists()), None)

    def _read_files(self, name: str, place: Path) -> PreparedTask:
        return SOURCES[name].read(place)

    def _format_of(self, arrays: ArrayFile) -> Any:
        return json.loads(arrays.text("about")).get("format")

    def _pack(self, found: PreparedTask) -> dict[str, Any]:
        about = {
            "format": self.format,
            "task": found.task,
            "sizes": found.sizes,
            "shape": found.tokens.shape,
            "facts": found.facts,
            "sha256": found.checksum(),
        }
        arrays = {"tokens": found.tokens, "targets": found.targets}
        pairs = {} if found.pairs is None else {"pairs": found.pairs}
        return {"about": np.array(json.dumps(about)), **arrays, **pairs}

    def _unpack(self, arrays: ArrayFile, name: str) -> PreparedTask:
        about = json.loads(arrays.text("about"))
        pairs = arrays["pairs"] if "pairs" in arrays else None  # noqa: SIM401, this is no dict
        found = PreparedTask(
            about["task"],
            PartSizes(*about["sizes"]),
            arrays.mapped("tokens"),
            arrays["targets"],
            pairs,
            about["facts"],
        )
        if found.task != name:
            raise ValueError(f"it holds the task {found.task!r}")
        if found.checksum() != about["sha256"]:
            raise ValueError(f"its checksum is not {about['sha256'][:12]}… as it says")
        return found

    def _advice(self, name: str, folder: Path | None) -> str:
        folder, ways = data_folders(self.domain, folder)[0], []
        if source := SOURCES.get(name):
            expected = " or ".join(str(Path(place) / source.probe) for place in source.places)
            ways.append(f"put {expected} there, from {source.origin}")
        if name in GENERATORS:
            ways.append(f"generate it with prepare_lra({name!r}, out={str(folder)!r})")
        ways += ["take 'retrieval-imdb'"] if name == "retrieval" else []
        return f"{name}: no data in {folder}; {', or '.join(ways)}"


LRA = Arena()
find_lra, load_lra, prepare_lra = LRA.find, LRA.load, LRA.prepare
