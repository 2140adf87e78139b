"""`primal data rl --agents`: data sets made by rolling out policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.tasks.offline_rl import RL, RL_SETS, environment_of, make_set, rl_folder


def make_sets(
    console: Any,
    domain: str,
    names: Sequence[str] | None,
    agents: Path,
    out: Path | None,
    transitions: int,
    seed: int,
) -> None:
    """Make the sets of those names, all by default; what was interrupted goes on."""
    from rich.console import Console
    from rich.progress import Progress

    if domain != "rl":
        raise ValueError(f"policies make sets of rl, not of {domain!r}")
    for name in names or RL_SETS:
        environment_of(name)
    for name in names or RL_SETS:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None)
            path = make_set(
                name,
                agents,
                rl_folder(out),
                transitions=transitions,
                seed=seed,
                told=lambda done, total: bar.update(task, completed=done, total=total),  # noqa: B023
            )
        console.print(f"{path}: {_told(path, name)}", markup=False)


def _told(path: Path, name: str) -> str:
    found = RL.read(path, name)
    facts = found.facts
    return (
        f"{facts['name']}, {len(found)} episodes, {len(found.rewards)} transitions, mean score "
        f"{facts['mean_score']} (best {facts['max_score']})"
    )
