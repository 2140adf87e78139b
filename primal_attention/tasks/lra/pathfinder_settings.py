"""What a Pathfinder image is made of: the numbers stated for the images of the Long Range Arena.

Lengths are pixels. Where the release states a list of one value, it is that value here.
"""

from dataclasses import dataclass, replace


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
_LARGE = replace(_HARD, paddle_length=5, continuity=1.8, paddle_contrast=1.0)

PATHFINDERS: dict[str, PathfinderSettings] = {
    "pathfinder": _HARD,
    "pathfinder-9": replace(_HARD, contour_length=9),
    "pathfinder-6": replace(_HARD, contour_length=6),
    "pathfinder64": replace(
        _LARGE,
        size=64,
        paddle_thickness=1.0,
        marker_radius=2.5,
        seed_distance=12,
        distractor_paddles=22,
        snake_contrast=0.8,
    ),
    "pathfinder128": replace(
        _LARGE,
        size=128,
        paddle_thickness=1.5,
        paddle_margins=(2, 3),
        marker_radius=3.0,
        seed_distance=20,
        distractor_paddles=35,
        snake_contrast=0.9,
    ),
    "pathfinder256": replace(
        _LARGE,
        size=256,
        paddle_thickness=2.0,
        paddle_margins=(3,),
        padding=22,
        marker_radius=5.0,
        seed_distance=27,
        distractor_paddles=30,
        snake_contrast=1.0,
    ),
}
"""The settings by the name of the task; what the release leaves open is its generator's default."""
