"""Pathfinder images in files: generated anew, or read from the folders of the Long Range Arena.

A folder such as ``pathfinder32/curv_contour_length_14`` has images ``imgs/<batch>/sample_<n>.png``
and lists ``metadata/<batch>.npy``, which are plain text: folder, file, number and label of an image
a line, then its settings. Some images of the release are empty files; they are left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra.cache import PartSizes, Prepared
from primal_attention.tasks.lra.chunks import Arrays, Progress, made_in_chunks, no_progress
from primal_attention.tasks.lra.pathfinder import draw_images
from primal_attention.tasks.lra.pathfinder_settings import PATHFINDERS, PathfinderSettings

SIZES = PartSizes(160_000, 20_000, 20_000)
CHUNK = 500


def generate_pathfinder(
    name: str,
    folder: Path,
    *,
    sizes: PartSizes = SIZES,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Prepared:
    """Images of ``PATHFINDERS[name]``; the same for any number of workers.

    Args:
        name: Of the task.
        folder: For chunks that are done, until all are.
        sizes: Of the parts.
        seed: Of the images.
        workers: Processes to share the work.
        progress: Called with chunks done and chunks in all.
    """
    settings, num = PATHFINDERS[name], sum(sizes)
    make = partial(_chunk, settings, seed, CHUNK)
    chunks = made_in_chunks(make, -(-num // CHUNK), folder, workers=workers, progress=progress)
    tokens = np.empty((num, settings.size**2), dtype=np.uint8)
    labels = np.empty(num, dtype=np.uint8)
    for i, (some_tokens, some_labels) in enumerate(chunks):
        here = slice(i * CHUNK, min((i + 1) * CHUNK, num))
        length = here.stop - here.start
        tokens[here], labels[here] = some_tokens[:length], some_labels[:length]
    facts = {"made by": "generate_pathfinder", "seed": seed, "settings": asdict(settings)}
    return Prepared(name, sizes, tokens, labels, facts=facts)


def _chunk(settings: PathfinderSettings, seed: int, size: int, index: int) -> Arrays:
    return draw_images(settings, seed, index * size, size)


def released_folder(name: str) -> str:
    """Where the release has the images of a task."""
    settings = PATHFINDERS[name]
    length = settings.contour_length
    level = "curv_baseline" if length == 6 else f"curv_contour_length_{length}"
    return f"pathfinder{settings.size}/{level}"


def read_pathfinder(name: str, folder: Path, *, seed: int = 0) -> Prepared:
    """The images of a folder of the release, shuffled, in parts of 80, 10 and 10 %.

    Args:
        name: Of the task.
        folder: With ``imgs`` and ``metadata``.
        seed: Of the order; the order that was used for published results is not known.
    """
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path))
    if not lists:
        raise FileNotFoundError(f"{folder / 'metadata'} has no .npy files, the lists of the images")
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for path, label in (case for each in lists for case in _listed(folder, each)):
        if content := path.read_bytes():
            images.append(_pixels(path, content, PATHFINDERS[name].size))
            labels.append(label)
    order = np.random.default_rng(seed).permutation(len(labels))
    train, upto = int(0.8 * len(labels)), int(0.9 * len(labels))
    sizes = PartSizes(train, upto - train, len(labels) - upto)
    facts = {"read from": released_folder(name), "seed of the order": seed}
    targets = np.array(labels, dtype=np.uint8)[order]
    return Prepared(name, sizes, np.stack(images)[order], targets, facts=facts)


def _listed(folder: Path, path: Path) -> Iterator[tuple[Path, int]]:
    """The file and the label of each image of a list."""
    for number, row in enumerate(_rows(path), start=1):
        if len(row) < 4 or row[3] not in ("0", "1"):
            raise ValueError(
                f"{path}, line {number}: expected folder, file, number, label 0 or 1, got {row[:4]}"
            )
        yield folder / row[0] / row[1], int(row[3])


def _rows(path: Path) -> list[list[str]]:
    """The rows of a list: plain text in the release, an array where the generator wrote it."""
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        rows: list[list[str]] = np.load(io.BytesIO(content), allow_pickle=False).tolist()
        return rows
    try:
        return [line.split() for line in content.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is neither text nor an array of strings") from error


def _pixels(path: Path, content: bytes, size: int) -> NDArray[np.uint8]:
    """The grey levels of a PNG, row after row."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("to read PNG files, pip install 'primal-attention[train]'") from error
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != (size, size):
                raise ValueError(f"it has {image.size} pixels, not ({size}, {size})")
            return np.asarray(image.convert("L"), dtype=np.uint8).ravel()
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a whole image ({error})") from error
