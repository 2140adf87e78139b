import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageDraw

from primal_attention.tasks.lra import PATHFINDERS, draw_scene
from primal_attention.tasks.lra.pathfinder import draw_images, grown, paddles

HARD = PATHFINDERS["pathfinder"]


@pytest.fixture(scope="module")
def scenes():
    return [draw_scene(HARD, 3, index) for index in range(250)]


def distance(one, other):
    return math.dist(one, other)


def test_the_settings_are_those_that_are_stated():
    assert (HARD.contour_length, HARD.distractor_length, HARD.num_distractors) == (14, 4, 5)
    lengths = [(each.distractor_length, each.num_distractors) for each in PATHFINDERS.values()]
    assert lengths == [(4, 5), (2, 10), (4, 8)]
    assert {each.size for each in PATHFINDERS.values()} == {32, 128}


def test_half_of_the_images_are_positive(scenes):
    labels = [scene.label for scene in scenes]
    assert set(labels) == {0, 1}
    assert np.mean(labels) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(len(labels)))


def test_both_snakes_have_the_contour_length(scenes):
    for scene in scenes:
        assert [len(path) for path in scene.paths] == [14, 14]


def test_markers_are_the_ends_of_one_snake_or_of_two(scenes):
    for scene in scenes:
        ends = [(path[0], path[-1]) for path in scene.paths]
        (one, stop), (other, end) = ends
        assert scene.markers in (ends if scene.label else [(one, end), (other, stop)])


def test_markers_tell_nothing_by_their_distance(scenes):
    """They are as far apart in positive images as in negative ones, about."""
    positive, negative = (
        [distance(*scene.markers) for scene in scenes if scene.label == label] for label in (1, 0)
    )
    assert np.mean(positive) == pytest.approx(np.mean(negative), abs=2.5)
    assert 5 < np.mean(positive) < 20


def test_seeds_lie_near_the_middle_and_at_the_seed_distance(scenes):
    for scene in scenes:
        first, second = (path[0] for path in scene.paths)
        assert all(12 <= place <= 19 for place in first)
        assert distance(first, second) == pytest.approx(HARD.seed_distance, abs=0.75)


def test_paddles_follow_each_other_at_a_step(scenes):
    """A paddle of two pixels and a gap of twice the margin of one."""
    steps = [
        distance(one, other)
        for scene in scenes
        for path in scene.paths
        for one, other in pairwise(path[1:])
    ]
    assert np.mean(steps) == pytest.approx(4, abs=0.6)
    assert max(steps) < 8


def test_snakes_stay_within_the_padding(scenes):
    places = np.array([place for scene in scenes for path in scene.paths for place in path])
    assert places.min() >= 2 and places.max() <= 29


def test_distractors_are_few_as_in_the_original(scenes):
    """Five are tried; most of their seeds have a direction that finds no place."""
    numbers = [scene.num_distractors for scene in scenes]
    assert max(numbers) <= 5
    assert np.mean(numbers) == pytest.approx(1.18, abs=4 / np.sqrt(len(numbers)))


@pytest.mark.parametrize(
    ("name", "directions"), [("pathfinder", range(-150, -120)), ("pathfinder128", range(-180, 180))]
)
def test_seeds_of_small_images_point_to_the_upper_left(name, directions):
    settings = PATHFINDERS[name]
    footprints = paddles(settings, settings.paddle_margins[0]).footprints
    assert [i - 180 for i, each in enumerate(footprints) if each is not None] == list(directions)


def test_images_are_bright_lines_and_discs_on_black(scenes):
    for scene in scenes[:50]:
        assert scene.image.dtype == np.uint8 and scene.image.shape == (32, 32)
        assert scene.image.max() == 255
        assert 0.5 < (scene.image == 0).mean() < 0.9
        for row, column in scene.markers:
            disc = scene.image[row - 1 : row + 1, column - 1 : column + 1]
            assert disc.min() > 100
        for row, column in (place for path in scene.paths for place in path):
            assert scene.image[row - 1 : row + 2, column - 1 : column + 2].max() > 80


def turns(settings, num):
    found = []
    for index in range(num):
        for path in draw_scene(settings, 1, index).paths:
            steps = np.diff(np.array(path[1:]), axis=0)
            angles = np.arctan2(steps[:, 0], steps[:, 1])
            found += np.abs((np.diff(angles) + np.pi) % (2 * np.pi) - np.pi).tolist()
    return np.mean(found)


def test_higher_continuity_is_straighter():
    settings = replace(HARD, contour_length=6)
    assert turns(replace(settings, continuity=2.5), 20) < 0.8 * turns(settings, 20)


@pytest.mark.parametrize("name", ["pathfinder-6", "pathfinder128"])
def test_other_lengths_and_sizes(name):
    settings = PATHFINDERS[name]
    scene = draw_scene(settings, 0, 1)
    assert scene.image.shape == (settings.size, settings.size)
    assert [len(path) for path in scene.paths] == [settings.contour_length] * 2
    edge = settings.padding
    inside = np.array(scene.paths)
    assert inside.min() > edge and inside.max() < settings.size - 1 - edge


def test_an_image_depends_on_seed_and_index_alone(scenes):
    tokens, labels = draw_images(HARD, 3, 2, 3)
    assert tokens.shape == (3, 1024)
    for row, label, scene in zip(tokens, labels, scenes[6:], strict=False):
        assert row.tobytes() == scene.image.tobytes() and label == scene.label
    assert draw_scene(HARD, 4, 7).image.tobytes() != scenes[7].image.tobytes()


def lines_of_pil(settings, margin):
    """The line and the ground of a seed of each direction, as the original draws them."""
    radius, scale = settings.paddle_length + math.ceil(settings.paddle_thickness) + margin, 2
    for degrees in range(-180, 180):
        middle, side, angle = radius * scale, 2 * radius + 1, math.radians(degrees)
        length = settings.paddle_length * scale
        column, row = (math.ceil(middle + length * f(angle)) for f in (math.cos, math.sin))
        large = Image.new("L", (2 * middle + 1, 2 * middle + 1))
        ends = [(middle, middle), (column, row)]
        width = round(settings.paddle_thickness * scale)
        ImageDraw.Draw(large).line(ends, fill=255, width=width)
        ground = Image.fromarray(grown(np.asarray(large, float), margin * scale).astype(np.uint8))
        yield [
            np.asarray(each.resize((side, side), Image.Resampling.LANCZOS)) / 255
            for each in (large, ground)
        ]


@pytest.mark.parametrize(("name", "mean_error"), [("pathfinder", 1e-6), ("pathfinder128", 0.005)])
def test_paddles_are_drawn_as_pillow_draws_them(name, mean_error):
    settings = PATHFINDERS[name]
    margin = settings.paddle_margins[0]
    errors = [
        np.abs(np.stack([paddle.line, paddle.ground]) - np.stack(theirs)).mean()
        for paddle, theirs in zip(
            paddles(settings, margin).seeds, lines_of_pil(settings, margin), strict=True
        )
    ]
    assert np.mean(errors) < mean_error
