"""Write docs/pathfinder.png: Pathfinder images, positives in the upper rows, negatives below.

python docs/make_pathfinder_sheet.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra import PATHFINDERS, draw_scene

ROWS, COLUMNS, ZOOM, GAP, SEED = 2, 6, 4, 4, 0


def sheet() -> NDArray[np.uint8]:
    scenes = [draw_scene(PATHFINDERS["pathfinder"], SEED, index) for index in range(100)]
    labels = [1] * ROWS + [0] * ROWS
    left = {label: [each.image for each in scenes if each.label == label] for label in (0, 1)}
    rows = [_row([left[label].pop(0) for _ in range(COLUMNS)]) for label in labels]
    return np.concatenate(rows)


def _row(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    large = (image.repeat(ZOOM, axis=0).repeat(ZOOM, axis=1) for image in images)
    framed = [np.pad(image, GAP, constant_values=96) for image in large]
    return np.concatenate(framed, axis=1)


def main() -> None:
    from PIL import Image

    Image.fromarray(sheet()).save(Path(__file__).with_name("pathfinder.png"), optimize=True)


if __name__ == "__main__":
    main()
