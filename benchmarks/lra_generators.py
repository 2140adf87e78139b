"""How many cases a second the generators of the Long Range Arena make, on one core.

ListOps is counted in trees, Pathfinder in images:

    python benchmarks/lra_generators.py [--seconds 5]
"""

import argparse
import time
from collections.abc import Callable, Iterator

from primal_attention.tasks.lra import PATHFINDERS, ListOpsSettings, draw_scene, make_trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure each for")
    seconds = parser.parse_args().seconds
    for name, make in generators():
        make(0)  # draws the paddles
        print(f"{name:16}{rate(make, seconds):10.1f} cases/s")


def generators() -> Iterator[tuple[str, Callable[[int], int]]]:
    """Names, and functions that make the cases of an index and say how many they are."""
    yield "listops", lambda index: len(make_trees(ListOpsSettings(), 0, index, 1000).values)
    for name, settings in PATHFINDERS.items():
        yield name, lambda index, settings=settings: len([draw_scene(settings, 0, index)])


def rate(make: Callable[[int], int], seconds: float) -> float:
    start, num, index = time.process_time(), 0, 0
    while time.process_time() - start < seconds:
        num += make(index := index + 1)
    return num / (time.process_time() - start)


if __name__ == "__main__":
    main()
