"""Pathfinder images: do two circles mark the ends of one dashed curve?

Two snakes of paddles and some short ones lie on black. In a positive image the circles mark both
ends of one of the two long snakes, in a negative one the start of one and the end of the other.

The procedure is that of Linsley et al. (2018) with the settings of the Long Range Arena, written
anew; ``docs/lra.md`` names what is approximate. An image depends on the seed and its index alone.

A paddle starts at the middle of a small square and lies in one direction. It comes with the ground
that it keeps others from, and with where the next paddle may end and how likely. A seed has one of
360 directions; a later paddle ends at one of the pixels of a circle, which are few. So paddles are
drawn once for every direction, and a snake is grown by looking things up.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra.chunks import InChunks
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pixel: TypeAlias = tuple[int, int]
Ways: TypeAlias = list[tuple[float, float]]

DEGREES = 360
NEARLY_SOLID = 0.8  # two paddles cross where one is solid and the other is at least this
PADDLE_TRIALS = 3
DISTRACTOR_TRIALS = 5
FREE_FOR_SEED = 0.7  # ground is free for a seed from this on
LEAST_FREE = 0.01  # of the image, for another distractor
SIZES = PartSizes(160_000, 20_000, 20_000)
CHUNK = 500


@dataclass(frozen=True)
class PathfinderSettings:
    """The defaults are those of the hard images of 32 x 32, ``curv_contour_length_14``."""

    size: int = 32
    contour_length: int = 14  # paddles of each of the two snakes
    paddle_length: int = 2
    paddle_thickness: float = 0.5
    paddle_margins: tuple[int, ...] = (1,)  # half the gap between paddles; one is drawn an image
    padding: int = 1
    antialias: int = 2
    marker_radius: float = 1.5
    seed_distance: int = 7  # between the first paddles of the two snakes
    continuity: float = 1.0  # the higher, the straighter
    distractor_paddles: int = 20  # in all
    snake_contrast: float = 2.0
    paddle_contrast: float = 0.75

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Distractors of an image, where there is room for all."""
        return self.distractor_paddles // self.distractor_length


_HARD = PathfinderSettings()

PATHFINDERS: dict[str, PathfinderSettings] = {
    "pathfinder": _HARD,
    "pathfinder-6": replace(_HARD, contour_length=6),
    "pathfinder128": replace(
        _HARD,
        size=128,
        paddle_length=5,
        paddle_thickness=1.5,
        paddle_margins=(2, 3),
        marker_radius=3.0,
        seed_distance=20,
        continuity=1.8,
        distractor_paddles=35,
        snake_contrast=0.9,
        paddle_contrast=1.0,
    ),
}
"""The settings by the name of the task; what the release leaves open is its generator's default."""


@dataclass(frozen=True, eq=False)
class Paddle:
    """A paddle around the pixel it starts at; squares of values from 0 to 1.

    ``free`` is what the paddle leaves of the ground around it, and with a margin around that.
    """

    line: Floats  # [n, n]
    ground: Floats  # [n, n]
    free: Floats  # [2, n + 2 margin, n + 2 margin]
    middle: Ints  # places where its ground is nearly solid, from the pixel on
    solid: Floats  # and how solid

    def footprint(self, reach: int) -> Ints | None:
        """Find where the ground is solid, as offsets [points, 2] of at most ``reach`` pixels.

        The offsets are one pixel too far down and right: so they are in the original. There, a
        seed whose footprint can lie beyond a corner of the image finds no place at all: None.
        """
        offsets = np.argwhere(self.ground == 1.0) - len(self.ground) // 2 + 1
        offsets = offsets[(np.abs(offsets) <= reach).all(axis=1)]
        corners = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        held = all((offsets * corner >= 0).all(axis=1).any() for corner in corners)
        return offsets if held else None


@dataclass(frozen=True, eq=False)
class Paddles:
    """Lookup tables to grow a snake, by the direction of its last paddle.

    The first 360 directions are those of a seed, in degrees; the others lead to the ends. A place
    is one number, row times ``side`` plus column, in an image with a border around it; ways down
    and right from a pixel are not rounded, the pixel they lead to is.
    """

    side: int  # of the image with its border
    border: int
    seeds: tuple[Paddle, ...]  # from the tail of a seed on
    heads: tuple[Paddle, ...]  # from an end back
    footprints: tuple[Ints | None, ...]  # of the seeds; None for those without any place
    to_head: Ways  # from the tail of a seed to its head, by direction
    to_pivot: Ways  # from there to its pivot, by direction
    step: Ways  # from a pivot to the next, by direction
    ends: Ints  # from a pivot to where its paddle may end
    likely: Floats  # how likely these are on free ground, [directions, ends]
    around: Ways  # from the first seed to the second, by direction

    def place(self, pixel: Pixel) -> int:
        """Return the place of a pixel of the image."""
        return (pixel[0] + self.border) * self.side + pixel[1] + self.border

    def pixel(self, place: int) -> Pixel:
        """Return the row and column of a place."""
        row, column = divmod(place, self.side)
        return row - self.border, column - self.border


@lru_cache(maxsize=16)
def paddles(settings: PathfinderSettings, margin: int) -> Paddles:
    """Draw the paddles of images with these settings."""
    reach = settings.paddle_length + margin
    border = 2 * reach + math.ceil(settings.paddle_thickness) + margin + 1
    way = np.array([settings.size + 2 * border, 1])  # of a pixel down, and right
    walked = reach * _unit(np.arange(0.0, 2 * math.pi, 1 / reach))  # a circle in steps of a pixel
    ends = np.unique(np.floor(np.round(walked, 9)).astype(np.int64), axis=0)
    to_ends = np.arctan2(ends[:, 0], ends[:, 1])
    of_seeds = np.arange(-DEGREES // 2, DEGREES // 2) * math.pi / 180
    directions = np.concatenate([of_seeds, to_ends])
    seeds = tuple(_paddle(settings, margin, each, way) for each in of_seeds)
    return Paddles(
        side=int(way[0]),
        border=border,
        seeds=seeds,
        heads=tuple(_paddle(settings, margin, each, way) for each in _turned(to_ends)),
        footprints=tuple(each.footprint(reach) for each in seeds),
        to_head=(settings.paddle_length * _unit(of_seeds)).tolist(),
        to_pivot=(reach * _unit(_turned(of_seeds))).tolist(),
        step=((settings.paddle_length + 2 * margin) * _unit(directions)).tolist(),
        ends=ends @ way,
        likely=_likely(directions, to_ends, settings.continuity),
        around=(settings.seed_distance * _unit(of_seeds % (2 * math.pi))).tolist(),
    )


def _unit(directions: Any) -> Floats:
    """Return steps of length one, down and right, [..., 2]."""
    return np.stack([np.sin(directions), np.cos(directions)], axis=-1)


def _turned(directions: Floats) -> Floats:
    return np.where(directions < 0, directions + math.pi, directions - math.pi)


def _likely(directions: Floats, to_ends: Floats, continuity: float) -> Floats:
    """Square the cosine of the turn times the continuity, zero from a right angle on."""
    turns = np.abs(to_ends[None, :] - directions[:, None])
    turns = np.minimum(turns, 2 * math.pi - turns)
    likely: Floats = np.cos(np.minimum(continuity * turns, math.pi / 2)) ** 2
    return likely


def _paddle(settings: PathfinderSettings, margin: int, direction: float, way: Ints) -> Paddle:
    """Draw a paddle ``antialias`` times too large and shrink it."""
    radius = settings.paddle_length + math.ceil(settings.paddle_thickness) + margin
    scale = settings.antialias
    side, middle = 2 * radius + 1, radius * scale
    end = np.ceil(middle + settings.paddle_length * scale * _unit(direction)).astype(int) - middle
    down, right = end.tolist()
    large = _line(2 * middle + 1, down, right, round(settings.paddle_thickness * scale))
    ground = shrunk(grown(large, margin * scale), side)
    wide = np.pad(ground, margin)
    nearly = np.argwhere(ground >= NEARLY_SOLID)
    return Paddle(
        line=shrunk(large, side),
        ground=ground,
        free=1 - np.stack([wide, grown(wide, margin)]),
        middle=(nearly - radius) @ way,
        solid=ground[ground >= NEARLY_SOLID],
    )


def _line(side: int, down: int, right: int, width: int) -> Floats:
    """Draw a line from the middle of a square, one or more pixels wide, both ends included."""
    image = np.zeros((side, side))
    if width == 1:
        longer = max(abs(down), abs(right))
        ahead = np.arange(longer + 1) / longer
        rows, columns = (_half_away(ahead * each) + side // 2 for each in (down, right))
        image[rows, columns] = 1.0
    else:
        image[_bar(*_coordinates(side, side // 2), down, right, width)] = 1.0
    return image


def _bar(y: Ints, x: Ints, down: int, right: int, width: int) -> NDArray[np.bool_]:
    """Mark the pixels of a bar whose corners are pixels; in a row, at most half a pixel off."""
    sides = (width // 2, (width - 1) // 2)  # an even width is wider on one side
    to_left, to_right = sides if abs(down) <= abs(right) else sides[::-1]
    aside = np.array([right, -down]) / math.hypot(down, right)
    one, other = _half_away(to_left * aside), _half_away(-to_right * aside)
    end = np.array([down, right])
    corners = [one, end + one, end + other, other]
    lowest, highest = np.min(corners, axis=0), np.max(corners, axis=0)
    within: NDArray[np.bool_]
    within = (y >= lowest[0]) & (y <= highest[0]) & (x >= lowest[1]) & (x <= highest[1])
    for start, stop in zip(corners, [*corners[1:], corners[0]], strict=True):
        rise, run = stop - start
        within &= rise * (x - start[1]) - run * (y - start[0]) >= -abs(rise) / 2
    return within


def _half_away(values: Floats) -> Ints:
    """Round to the nearest integers, halves away from zero."""
    nearest: Ints = np.copysign(np.floor(np.abs(values) + 0.5), values).astype(np.int64)
    return nearest


def _coordinates(side: int, middle: int) -> tuple[Ints, Ints]:
    """Number rows [side, 1] and columns [1, side] of a square from the middle."""
    places = np.arange(side) - middle
    return places[:, None], places[None, :]


def grown(image: Floats, radius: int) -> Floats:
    """Take the highest value within the radius of each pixel."""
    padded, result = np.pad(image, radius), image.copy()
    height, width = image.shape
    for down in range(-radius, radius + 1):
        for right in range(-radius, radius + 1):
            if down**2 + right**2 <= radius**2:
                top, left = radius + down, radius + right
                np.maximum(result, padded[top : top + height, left : left + width], out=result)
    return result


def shrunk(image: Floats, side: int) -> Floats:
    """Resize a square image by Lanczos' filter, in 256 levels from 0 to 1."""
    filter_ = _lanczos(len(image), side)
    return _quantised(filter_ @ _quantised(image @ filter_.T))


def _quantised(image: Floats) -> Floats:
    return np.round(255 * np.clip(image, 0.0, 1.0)) / 255


@lru_cache(maxsize=64)
def _lanczos(size: int, side: int) -> Floats:
    """Make the matrix [side, size] of Lanczos' filter with three lobes, stretched to shrink."""
    stretch = size / side
    middles = (np.arange(side) + 0.5) * stretch
    distances = (np.arange(size)[None, :] + 0.5 - middles[:, None]) / stretch
    weights = np.where(np.abs(distances) < 3, np.sinc(distances) * np.sinc(distances / 3), 0.0)
    normalised: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normalised


@lru_cache(maxsize=16)
def marker(settings: PathfinderSettings) -> Floats:
    """Draw a disc around its middle, with room for the ripples of the filter."""
    radius, scale = math.ceil(settings.marker_radius) + 4, settings.antialias
    y, x = _coordinates((2 * radius + 1) * scale, radius * scale)
    disc = (y**2 + x**2 <= (settings.marker_radius * scale) ** 2).astype(np.float64)
    return shrunk(disc, 2 * radius + 1)


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
    """Draw the image of an index in the endless row of images that the seed stands for."""
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
    contrasts = (settings.snake_contrast * settings.paddle_contrast, settings.snake_contrast)
    for drawn, contrast in zip((snakes, distractors), contrasts, strict=True):
        for place, paddle in (part for snake in drawn for part in snake.parts):
            _draw(image, place, contrast * paddle.line)
    for place in markers:
        _draw(image, place, marker(settings))
    inside = image[table.border : -table.border, table.border : -table.border]
    return Scene(
        (255 * inside / inside.max() + 0.5).astype(np.uint8),  # the brightest pixel at 255
        label,
        (table.pixel(markers[0]), table.pixel(markers[1])),
        tuple(tuple(table.pixel(place) for place, _ in snake.parts) for snake in snakes),
        len(distractors),
    )


def draw_images(
    settings: PathfinderSettings, seed: int, chunk: int, num: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw the images of a chunk as rows of pixels [num, size²], and their labels [num]."""
    tokens = np.empty((num, settings.size**2), dtype=np.uint8)
    labels = np.empty(num, dtype=np.uint8)
    for row in range(num):
        scene = draw_scene(settings, seed, chunk * num + row)
        tokens[row], labels[row] = scene.image.ravel(), scene.label
    return tokens, labels


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


def _empty(settings: PathfinderSettings, margin: int, table: Paddles) -> Floats:
    """Make free ground, [2, side, side]: by itself, and with a margin around each pixel.

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
    """Grow both long snakes in turns; return the free ground too, None where one is stuck."""
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
    """Draw a pixel where the first seed stays within the middle; None without any."""
    footprint, edge = table.footprints[direction], 2 * settings.seed_distance
    if footprint is None:
        return None
    low, high = edge - footprint.min(axis=0), settings.size - edge - footprint.max(axis=0)
    rows, columns = (high - low).tolist()
    if rows < 1 or columns < 1:
        return None
    return int(low[0]) + _any(rng, rows), int(low[1]) + _any(rng, columns)


def _any(rng: np.random.Generator, num: int) -> int:
    """Draw a number below ``num``; quicker than ``integers``."""
    return int(rng.random() * num)


def _seed(table: Paddles, tail: Pixel, direction: int) -> Snake:
    """Begin a snake of one paddle."""
    head = _ahead(tail, table.to_head[direction])
    pivot = _ahead(head, table.to_pivot[direction])
    return Snake(pivot, direction, ((table.place(tail), table.seeds[direction]),))


def _ahead(pixel: Pixel, way: tuple[float, float]) -> Pixel:
    """Follow a way and round up; errors of the sum count, as in the original."""
    return math.ceil(pixel[0] + way[0]), math.ceil(pixel[1] + way[1])


def _extended(table: Paddles, free: Floats, snake: Snake, rng: np.random.Generator) -> Snake | None:
    """Add a paddle to a snake; the ground of the one before is taken."""
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
    """View the square around a place, in each layer [..., side, side]."""
    row, column = divmod(place, layers.shape[-1])
    top, left = row - side // 2, column - side // 2
    view: Floats = layers[..., top : top + side, left : left + side]
    return view


def _distractors(
    settings: PathfinderSettings, table: Paddles, free: Floats, rng: np.random.Generator
) -> Iterator[Snake]:
    """Grow short snakes on free ground; one that finds no place in some trials is left out."""
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
    """Grow a short snake, which takes its ground; None where it is stuck."""
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
    """List the pixels where a seed of that direction finds free ground, [pixels, 2]."""
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


def _draw(image: Floats, place: int, picture: Floats) -> None:
    """Draw a picture around a place, over what is darker."""
    view = _window(image, place, len(picture))
    np.maximum(view, picture, out=view)
