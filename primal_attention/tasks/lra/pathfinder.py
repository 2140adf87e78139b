"""Pathfinder images: do two circles mark the ends of one dashed curve?

Two snakes of paddles and some short ones lie on black. In a positive image the circles mark both
ends of one of the two long snakes, in a negative one the start of one and the end of the other.

The procedure is that of Linsley et al. (2018) with the settings of the Long Range Arena, written
anew; ``docs/lra.md`` names what is approximate. An image depends on the seed and its index alone.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra.pathfinder_paddles import (
    DEGREES,
    NEARLY_SOLID,
    Floats,
    Ints,
    Paddle,
    Paddles,
    Pixel,
    marker,
    paddles,
)
from primal_attention.tasks.lra.pathfinder_settings import PathfinderSettings

PADDLE_TRIALS = 3
DISTRACTOR_TRIALS = 5
FREE_FOR_SEED = 0.7  # ground is free for a seed from this on
LEAST_FREE = 0.01  # of the image, for another distractor


class Scene(NamedTuple):
    """An image and what is on it; places are (row, column)."""

    image: NDArray[np.uint8]  # [size, size]
    label: int  # 1: the markers are the ends of one snake
    markers: tuple[Pixel, Pixel]
    paths: tuple[tuple[Pixel, ...], ...]  # origin and heads of both snakes
    num_distractors: int


class Snake(NamedTuple):
    """A snake as far as it goes; the ground of its last paddle is still free."""

    pivot: Pixel  # where its last paddle turned
    direction: int  # of its last paddle, among those of the table
    parts: tuple[tuple[int, Paddle], ...]  # each paddle, and from where it is drawn


def draw_scene(settings: PathfinderSettings, seed: int, index: int) -> Scene:
    """The image of that index, of the endless row of images that the seed stands for."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    label, margin = int(rng.integers(2)), int(rng.choice(settings.paddle_margins))
    table = paddles(settings, margin)
    empty = _empty(settings, margin, table)
    while (grown := _two_snakes(settings, table, empty, rng)) is None:
        pass
    free, snakes = grown
    distractors = list(_distractors(settings, table, free, rng))
    first = int(rng.integers(2))
    second = first if label else 1 - first
    markers = snakes[first].parts[0][0], snakes[second].parts[-1][0]
    image = np.zeros((table.side, table.side))
    _draw_snakes(image, snakes, settings.snake_contrast * settings.paddle_contrast)
    _draw_snakes(image, distractors, settings.snake_contrast)
    for place in markers:
        _draw(image, place, marker(settings))
    return Scene(
        _levels(image[table.border : -table.border, table.border : -table.border]),
        label,
        (table.pixel(markers[0]), table.pixel(markers[1])),
        tuple(tuple(table.pixel(place) for place, _ in snake.parts) for snake in snakes),
        len(distractors),
    )


def draw_images(
    settings: PathfinderSettings, seed: int, first: int, num: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images from an index on as rows of pixels [num, size²], and their labels [num]."""
    tokens = np.empty((num, settings.size**2), dtype=np.uint8)
    labels = np.empty(num, dtype=np.uint8)
    for row in range(num):
        scene = draw_scene(settings, seed, first + row)
        tokens[row], labels[row] = scene.image.ravel(), scene.label
    return tokens, labels


def _empty(settings: PathfinderSettings, margin: int, table: Paddles) -> Floats:
    """How free the ground is, [2, side, side]: by itself, and with a margin around each pixel.

    Beyond the image the first is free, for paddles at the edge, and the second is not.
    """
    free = np.zeros((2, table.side, table.side))
    inside = slice(table.border, -table.border)
    free[0], free[0, inside, inside] = 1.0, 0.0
    for layer, edge in zip(free, (settings.padding, settings.padding + margin), strict=True):
        inside = slice(table.border + edge, -(table.border + edge))
        layer[inside, inside] = 1.0
    return free


def _two_snakes(
    settings: PathfinderSettings, table: Paddles, empty: Floats, rng: np.random.Generator
) -> tuple[Floats, list[Snake]] | None:
    """What ground both long snakes leave, and these, grown in turns; None where one is stuck."""
    tail = _first_tail(settings, table, direction := _any(rng, DEGREES), rng)
    if tail is None:
        return None
    free = empty.copy()
    down, right = table.around[_any(rng, DEGREES)]
    other = round(tail[0] + down), round(tail[1] + right)
    snakes = [_seed(table, tail, direction), _seed(table, other, _any(rng, DEGREES))]
    for _ in range(settings.contour_length - 1):
        for i, snake in enumerate(snakes):
            longer = _extended(table, free, snake, rng)
            if longer is None:
                return None
            snakes[i] = longer
    _take(free, snakes[1])  # and not the last paddle of the other, as in the original
    return free, snakes


def _first_tail(
    settings: PathfinderSettings, table: Paddles, direction: int, rng: np.random.Generator
) -> Pixel | None:
    """A pixel where the first seed stays within the middle of the image; None without any."""
    footprint, edge = table.footprints[direction], 2 * settings.seed_distance
    if footprint is None:
        return None
    low, high = edge - footprint.min(axis=0), settings.size - edge - footprint.max(axis=0)
    rows, columns = (high - low).tolist()
    if rows < 1 or columns < 1:
        return None
    return int(low[0]) + _any(rng, rows), int(low[1]) + _any(rng, columns)


def _any(rng: np.random.Generator, num: int) -> int:
    """A number below ``num``; quicker than ``integers``."""
    return int(rng.random() * num)


def _seed(table: Paddles, tail: Pixel, direction: int) -> Snake:
    """A snake of one paddle."""
    head = _ahead(tail, table.to_head[direction])
    pivot = _ahead(head, table.to_pivot[direction])
    return Snake(pivot, direction, ((table.place(tail), table.seeds[direction]),))


def _ahead(pixel: Pixel, way: tuple[float, float]) -> Pixel:
    """The pixel that a way leads to, rounded up; errors of the sum count, as in the original."""
    return math.ceil(pixel[0] + way[0]), math.ceil(pixel[1] + way[1])


def _extended(table: Paddles, free: Floats, snake: Snake, rng: np.random.Generator) -> Snake | None:
    """The snake with one more paddle; the ground of the one before is taken."""
    pivot = _ahead(snake.pivot, table.step[snake.direction])
    place = table.place(pivot)
    likely = table.likely[snake.direction] * free[1].take(table.ends + place)
    upto = likely.cumsum()
    if (total := float(upto[-1])) < 1e-4:
        return None
    for _ in range(PADDLE_TRIALS):
        end = int(upto.searchsorted(rng.random() * total, side="right"))
        head, paddle = place + int(table.ends[end]), table.heads[end]
        if (paddle.solid - free[0].take(paddle.middle + head)).max() < NEARLY_SOLID:
            _take(free, snake)
            return Snake(pivot, DEGREES + end, (*snake.parts, (head, paddle)))
    return None


def _take(free: Floats, snake: Snake) -> None:
    """Take the ground of the last paddle of a snake."""
    place, paddle = snake.parts[-1]
    view = _window(free, place, paddle.free.shape[-1])
    np.minimum(view, paddle.free, out=view)


def _window(layers: Floats, place: int, side: int) -> Floats:
    """The square around a place, in each layer [..., side, side]."""
    row, column = divmod(place, layers.shape[-1])
    top, left = row - side // 2, column - side // 2
    view: Floats = layers[..., top : top + side, left : left + side]
    return view


def _distractors(
    settings: PathfinderSettings, table: Paddles, free: Floats, rng: np.random.Generator
) -> Iterator[Snake]:
    """Short snakes on ground that is free; one that finds no place in some trials is left out."""
    for _ in range(settings.num_distractors):
        for _ in range(DISTRACTOR_TRIALS):
            left = free.copy()
            snake = _distractor(settings, table, left, rng)
            if snake is not None:
                free = left
                yield snake
                break


def _distractor(
    settings: PathfinderSettings, table: Paddles, free: Floats, rng: np.random.Generator
) -> Snake | None:
    """One more short snake, which takes its ground; None where it is stuck."""
    direction = _any(rng, DEGREES)
    tails = _free_tails(free[0], table, direction)
    if not len(tails):
        return None
    row, column = tails[_any(rng, len(tails))].tolist()
    snake = _seed(table, (row, column), direction)
    for _ in range(settings.distractor_length - 1):
        longer = _extended(table, free, snake, rng)
        if longer is None:
            return None
        snake = longer
    _take(free, snake)
    return snake


def _free_tails(free: Floats, table: Paddles, direction: int) -> Ints:
    """The pixels where a seed of that direction finds free ground, [pixels, 2]."""
    footprint, border = table.footprints[direction], table.border
    size = table.side - 2 * border
    taken = np.ones(free.shape, dtype=bool)
    inside = free[border:-border, border:-border] < FREE_FOR_SEED
    taken[border:-border, border:-border] = inside
    if footprint is None or np.mean(inside) > 1 - LEAST_FREE:
        return np.empty((0, 2), dtype=np.int64)
    blocked = np.zeros((size, size), dtype=bool)
    for down, right in (footprint + border).tolist():
        blocked |= taken[down : down + size, right : right + size]
    return np.argwhere(~blocked)


def _draw_snakes(image: Floats, snakes: list[Snake], contrast: float) -> None:
    for snake in snakes:
        for place, paddle in snake.parts:
            _draw(image, place, contrast * paddle.line)


def _draw(image: Floats, place: int, picture: Floats) -> None:
    """Draw a picture around a place, over what is darker."""
    view = _window(image, place, len(picture))
    np.maximum(view, picture, out=view)


def _levels(image: Floats) -> NDArray[np.uint8]:
    """The image in 256 levels, its brightest pixel at 255."""
    levels: NDArray[np.uint8] = (255 * image / image.max() + 0.5).astype(np.uint8)
    return levels
