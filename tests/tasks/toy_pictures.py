"""Pictures whose class shows in their stripes and colour, in a folder for each class."""

import numpy as np
from PIL import Image

CLASSES = ("birds", "cats", "dogs")
SIDE = 21


def picture(rng, label, width=SIDE, height=SIDE):
    """Stripes that are upright, level or slanting, in red, green or blue, with noise."""
    y, x = np.mgrid[:height, :width]
    stripes = 100 * (np.array([x, y, x + y][label % 3]) // 3 % 2)
    pixels = np.repeat(stripes[..., None], 3, axis=-1) + rng.integers(0, 40, (height, width, 3))
    pixels[..., label % 3] += 100
    return Image.fromarray(pixels.astype(np.uint8))


def write_pictures(folder, counts=(11, 5), classes=CLASSES, suffix="png", **size):
    """``train/<class>`` and ``val/<class>`` with so many pictures each."""
    rng = np.random.default_rng(0)
    for part, count in zip(("train", "val"), counts, strict=True):
        for label, name in enumerate(classes):
            place = folder / part / name
            place.mkdir(parents=True)
            for i in range(count):
                picture(rng, label, **size).save(place / f"{i:03}.{suffix}")
    return folder
