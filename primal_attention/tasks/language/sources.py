"""Where a text is read from: a prepared ``<folder>/<name>.npz``, or else its three files.

The files lie in ``<folder>/<name>``, as their archives unpack, or in a folder that is given.
"""

import difflib
import os
from pathlib import Path

from primal_attention.tasks.language.cache import read_prepared, write_prepared
from primal_attention.tasks.language.corpus import FILES, Corpus, read_corpus

LANGUAGE_SETS = ("wikitext-2", "wikitext-103")


def load_language(name: str, folder: Path | None = None) -> Corpus:
    """The three parts of a text.

    Args:
        name: One of ``LANGUAGE_SETS``.
        folder: Where to look; ``language`` in the folder that the environment variable
            ``PRIMAL_DATA`` names, and that folder itself, or in ``data``, unless told.
    """
    place = find_language(name, folder)
    if place is None:
        raise FileNotFoundError(_what_to_do(name, folder))
    return read_prepared(place) if place.name == f"{name}.npz" else read_corpus(place)


def find_language(name: str, folder: Path | None = None) -> Path | None:
    """Where ``load_language`` would read a text from; None where it is not at hand."""
    _check_name(name)
    prepared = (each / f"{name}.npz" for each in language_folders(folder))
    return next((path for path in prepared if path.is_file()), _files(name, folder))


def prepare_language(name: str, folder: Path | None = None, out: Path | None = None) -> Path:
    """Write a text to ``<out>/<name>.npz``, which is smaller than its files and loads fast.

    Args:
        name: One of ``LANGUAGE_SETS``.
        folder: Where its files are, as for ``load_language``; a prepared file there is not read.
        out: Where to write; the folder unless told.
    """
    _check_name(name)
    place = _files(name, folder)
    if place is None:
        raise FileNotFoundError(_what_to_do(name, folder))
    path = (language_folders(folder)[0] if out is None else Path(out)) / f"{name}.npz"
    write_prepared(path, read_corpus(place))
    return path


def language_folders(folder: Path | None = None) -> list[Path]:
    """Where to look; prepared files are written to the first."""
    if folder is not None:
        return [Path(folder)]
    data = Path(os.environ.get("PRIMAL_DATA", "data"))
    return [data / "language", data]


def _files(name: str, folder: Path | None) -> Path | None:
    """The folder that holds the files of a text, some of them at least."""
    places = [each / name for each in language_folders(folder)]
    places += [] if folder is None else [Path(folder)]
    return next((each for each in places if any((each / file).is_file() for file in FILES)), None)


def _check_name(name: str) -> None:
    if name not in LANGUAGE_SETS:
        near = difflib.get_close_matches(name, LANGUAGE_SETS) or LANGUAGE_SETS
        raise ValueError(f"name {name!r} is no text; did you mean one of {', '.join(near)}?")


def _what_to_do(name: str, folder: Path | None) -> str:
    place = language_folders(folder)[0]
    return (
        f"{name}: no data. Put {', '.join(FILES)}, from the archive {name}-v1.zip, into "
        f"{place / name}, or a prepared {name}.npz into {place}"
    )
