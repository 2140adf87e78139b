"""Describe the D4RL-like sets: behaviours, episodes, transitions, measured scores.

    python reproduction/primal_attention/table4_d4rl/data.py --data data/rl

Read from the sets themselves, which keep what they were made with. The row of a set has no policy.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from primal_attention.atomic_files import write_rows
from primal_attention.tasks.offline_rl import RL_SETS, environment_of, load_rl
from primal_attention.training.results import current_commit

HERE = Path(__file__).parent
COLUMNS = (
    *("dataset", "policy", "episodes", "transitions", "score", "deviation", "best"),
    *("environment", "seed", "commit"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=RL_SETS, help="sets, default: all")
    parser.add_argument("--data", type=Path, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=HERE / "data.csv")
    arguments = parser.parse_args()
    rows = [row for name in arguments.names for row in rows_of(name, arguments.data)]
    write_rows(arguments.out, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def rows_of(name: str, folder: Path | None) -> Iterator[list[object]]:
    """The set as a whole, then each of its behaviours."""
    found = load_rl(name, folder)
    scores = environment_of(name).score(found.returns)
    facts = found.facts
    made = [facts["environment"], facts["seed"], current_commit()]
    spread = [f"{each:.2f}" for each in (scores.mean(), scores.std(), scores.max())]
    yield [name, "", len(found), len(found.rewards), *spread, *made]
    for policy, each in facts["behaviours"].items():
        sizes = [each["episodes"], each["transitions"], f"{each['score']:.2f}"]
        yield [name, policy, *sizes, "", "", *made]


if __name__ == "__main__":
    main()
