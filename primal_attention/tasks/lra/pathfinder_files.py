"""Pathfinder images in files: generated anew, or read from the folders of the Long Range Arena.

A folder such as ``pathfinder32/curv_contour_length_14`` has images ``imgs/<batch>/sample_<n>.png``
and lists ``metadata/<batch>.npy``, which are plain text: folder, file, number and label of an image
a line, then its settings. Some images of the release are empty files; they are left out.
"""

import io
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from primal_attention.extras import needing
from primal_attention.foreign_files import read_bytes, reading, reason
from primal_attention.tasks.lra.chunks import InChunks
from primal_attention.tasks.lra.pathfinder import PATHFINDERS, draw_images
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask

SIZES = PartSizes(160_000, 20_000, 20_000)
CHUNK = 500
MOST = 2**24  # bytes of an image or of a list of a thousand


def generate_pathfinder(
    name: str, in_chunks: InChunks, *, sizes: PartSizes = SIZES, seed: int = 0
) -> PreparedTask:
    """Generate images of ``PATHFINDERS[name]``.

    Args:
        name: Of the task.
        in_chunks: Runs the work; see ``made_in_chunks``.
        sizes: Of the parts.
        seed: Of the images.
    """
    settings = PATHFINDERS[name]
    make = partial(draw_images, settings, seed, num=CHUNK)
    tokens, labels = in_chunks(make, sum(sizes), CHUNK)
    facts = {"made by": "generate_pathfinder", "seed": seed, "settings": asdict(settings)}
    return PreparedTask(name, sizes, tokens, labels, facts=facts)


def released_folder(name: str) -> str:
    """Return where the release has the images of a task."""
    settings = PATHFINDERS[name]
    length = settings.contour_length
    level = "curv_baseline" if length == 6 else f"curv_contour_length_{length}"
    return f"pathfinder{settings.size}/{level}"


def read_pathfinder(name: str, folder: Path, *, seed: int = 0) -> PreparedTask:
    """Read the images of a folder of the release, shuffled, in parts of 80, 10 and 10 %.

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
    for path, content, label in (case for each in lists for case in _listed(folder, each)):
        if content:
            images.append(_pixels(path, content, PATHFINDERS[name].size))
            labels.append(label)
    if not images:
        raise ValueError(f"{folder} has no image that is not empty; get the whole archive anew")
    order = np.random.default_rng(seed).permutation(len(labels))
    train, upto = int(0.8 * len(labels)), int(0.9 * len(labels))
    sizes = PartSizes(train, upto - train, len(labels) - upto)
    facts = {"read from": released_folder(name), "seed of the order": seed}
    targets = np.array(labels, dtype=np.uint8)[order]
    return PreparedTask(name, sizes, np.stack(images)[order], targets, facts=facts)


def _listed(folder: Path, path: Path) -> Iterator[tuple[Path, bytes, int]]:
    """Yield the file, its content and the label of each image of a list."""
    for number, row in enumerate(_rows(path), start=1):
        if len(row) < 4 or row[3] not in ("0", "1"):
            found = str(row[:4])[:100]
            raise ValueError(
                f"{path}, line {number}: expected folder, file, number, label 0 or 1, got {found}"
            )
        name = PurePosixPath(row[0], row[1])
        if name.is_absolute() or ".." in name.parts or "\0" in str(name):
            raise ValueError(
                f"{path}, line {number}: {str(name)[:100]!r} is outside of the folder; "
                "get the whole archive anew"
            )
        try:
            content = read_bytes(folder / name, MOST)
        except OSError as error:
            raise ValueError(
                f"{path}, line {number}: the image cannot be read ({reason(error)}); "
                "get the whole archive anew"
            ) from error
        yield folder / name, content, int(row[3])


def _rows(path: Path) -> list[list[str]]:
    """Read the rows of a list."""
    with reading(path, "a list of images", "get the whole archive anew"):
        lines = read_bytes(path, MOST).decode().splitlines()
        return [line.split() for line in lines if line.strip()]


def _pixels(path: Path, content: bytes, size: int) -> NDArray[np.uint8]:
    """Read the grey levels of a PNG, row after row."""
    with needing("PNG files need Pillow", "train"):
        from PIL import Image
    with (
        reading(path, "a whole image", "get it anew"),
        Image.open(io.BytesIO(content), formats=["PNG"]) as image,
    ):
        if image.size != (size, size):
            raise ValueError(f"it has {image.size} pixels, not ({size}, {size})")
        return np.asarray(image.convert("L"), dtype=np.uint8).ravel()
