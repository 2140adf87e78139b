"""Paddles of Pathfinder images, drawn once for every direction they can have.

A paddle starts at the middle of a small square and lies in one direction. It comes with the ground
that it keeps others from, and with where the next paddle may end and how likely. A seed has one of
360 directions; a later paddle ends at one of the pixels of a circle, which are few. So a snake is
grown by looking things up.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra.pathfinder_settings import PathfinderSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pixel: TypeAlias = tuple[int, int]
Ways: TypeAlias = list[tuple[float, float]]

DEGREES = 360
NEARLY_SOLID = 0.8  # two paddles cross where one is solid and the other is at least this


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
        """Where the ground is solid, as offsets [points, 2] of at most ``reach`` pixels.

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
    """All there is to know to grow a snake, by the direction of its last paddle.

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
        """The place of a pixel of the image."""
        return (pixel[0] + self.border) * self.side + pixel[1] + self.border

    def pixel(self, place: int) -> Pixel:
        """The row and column of a place."""
        row, column = divmod(place, self.side)
        return row - self.border, column - self.border


@lru_cache(maxsize=16)
def paddles(settings: PathfinderSettings, margin: int) -> Paddles:
    """The paddles of images with these settings."""
    reach = settings.paddle_length + margin
    border = 2 * reach + math.ceil(settings.paddle_thickness) + margin + 1
    way = np.array([settings.size + 2 * border, 1])  # of a pixel down, and right
    ends = _circle(reach)
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
    """A step of length one, down and right, [..., 2]."""
    return np.stack([np.sin(directions), np.cos(directions)], axis=-1)


def _turned(directions: Floats) -> Floats:
    """The opposite directions."""
    return np.where(directions < 0, directions + math.pi, directions - math.pi)


def _circle(radius: int) -> Ints:
    """The pixels, relative to the middle, of a circle that is walked in steps of one pixel."""
    angles = np.arange(0.0, 2 * math.pi, 1 / radius)
    points = np.round(radius * _unit(angles), 9)
    return np.unique(np.floor(points).astype(np.int64), axis=0)


def _likely(directions: Floats, to_ends: Floats, continuity: float) -> Floats:
    """The squared cosine of the turn times the continuity, zero from a right angle on."""
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
    """A line from the middle of a square, one or more pixels wide, both ends included."""
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
    """The pixels of a bar whose corners are pixels; of a row, those at most half a pixel off."""
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
    """The nearest integers, of two the one farther from zero."""
    nearest: Ints = np.copysign(np.floor(np.abs(values) + 0.5), values).astype(np.int64)
    return nearest


def _coordinates(side: int, middle: int) -> tuple[Ints, Ints]:
    """Rows [side, 1] and columns [1, side] of a square, counted from the middle."""
    places = np.arange(side) - middle
    return places[:, None], places[None, :]


def grown(image: Floats, radius: int) -> Floats:
    """The highest value within the radius of each pixel."""
    padded, result = np.pad(image, radius), image.copy()
    height, width = image.shape
    for down in range(-radius, radius + 1):
        for right in range(-radius, radius + 1):
            if down**2 + right**2 <= radius**2:
                top, left = radius + down, radius + right
                np.maximum(result, padded[top : top + height, left : left + width], out=result)
    return result


def shrunk(image: Floats, side: int) -> Floats:
    """A square image at another size by Lanczos' filter, in 256 levels from 0 to 1."""
    filter_ = _lanczos(len(image), side)
    return _levels(filter_ @ _levels(image @ filter_.T))


def _levels(image: Floats) -> Floats:
    return np.round(255 * np.clip(image, 0.0, 1.0)) / 255


@lru_cache(maxsize=64)
def _lanczos(size: int, side: int) -> Floats:
    """The matrix [side, size] of Lanczos' filter with three lobes, stretched to shrink by."""
    stretch = size / side
    middles = (np.arange(side) + 0.5) * stretch
    distances = (np.arange(size)[None, :] + 0.5 - middles[:, None]) / stretch
    weights = np.where(np.abs(distances) < 3, np.sinc(distances) * np.sinc(distances / 3), 0.0)
    normalised: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normalised


@lru_cache(maxsize=16)
def marker(settings: PathfinderSettings) -> Floats:
    """A disc around its middle, with room for the ripples of the filter."""
    radius, scale = math.ceil(settings.marker_radius) + 4, settings.antialias
    y, x = _coordinates((2 * radius + 1) * scale, radius * scale)
    disc = (y**2 + x**2 <= (settings.marker_radius * scale) ** 2).astype(np.float64)
    return shrunk(disc, 2 * radius + 1)
