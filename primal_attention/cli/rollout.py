"""`primal rollout`: trained policies in their environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from primal_attention.cli.arguments import check_name, naming
from primal_attention.tasks.offline_rl import MODES, Trial, environment_of
from primal_attention.tasks.offline_rl.environments import VERSIONS, package
from primal_attention.training.devices import launch
from primal_attention.training.results import Row, add_rows, current_commit, read_rows
from primal_attention.training.rollouts import Told, missing_rows, read_policies


def rollout(  # noqa: PLR0913 - each is an option of the command
    runs: Annotated[list[Path], typer.Argument(help="Run directories of rl/...")],
    episodes: Annotated[int, typer.Option(help="Of each policy.", min=1)] = 10,
    target: Annotated[
        float | None, typer.Option(help="Return to ask for; default: the papers' higher one.")
    ] = None,
    mode: Annotated[str, typer.Option(help="window, or state: all of the past.")] = "window",
    seed: Annotated[int, typer.Option(help="Of the first episode.", min=0)] = 100,
    version: Annotated[int, typer.Option(help="5 or 4, of the environment.")] = 5,
    accelerator: Annotated[str, typer.Option(help="cpu or cuda: where models act.")] = "cpu",
    results: Annotated[Path, typer.Option(help="The file to add to.")] = Path("runs/rollouts.csv"),
    video: Annotated[
        Path | None, typer.Option(help="Folder for a .gif of an episode of each policy.")
    ] = None,
) -> None:
    """Roll out the last and the best policy of runs; those that have a row are skipped."""
    with naming("--mode or --version"):
        check_name("mode", mode, MODES)
        if version not in VERSIONS:
            raise ValueError(f"version must be one of {VERSIONS}, got {version}")
    with naming("--accelerator"):
        device = launch("fp32", accelerator=accelerator, devices=1).device
    with naming():
        package("gymnasium")
        package("mujoco")
    with naming("RUNS"):
        found = [read_policies(path) for path in runs]
    with naming("--results"):
        read_rows(results)
    console, commit = Console(highlight=False, soft_wrap=True), current_commit()
    for each in found:
        goal = environment_of(each.recipe.set_name).targets[0] if target is None else target
        trial = Trial(goal, episodes, seed, version)
        watching = partial(_progress, environment_of(each.recipe.set_name).longest)
        rows = read_rows(results)
        for row in missing_rows(
            each,
            trial,
            mode,
            rows,
            commit=commit,
            device=device,
            watching=watching,
            video=video,
        ):
            add_rows(results, [row])
            console.print(_told(row))


@contextmanager
def _progress(steps: int, name: str) -> Iterator[Told]:
    """Show a bar over the steps of the longest episode."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda step: bar.update(task, completed=step + 1)


def _told(row: Row) -> str:
    margin = f" ± {float(row['margin']):.1f}" if row["margin"] else ""
    return (
        f"{row['dataset']}, {row['model']}, {row['protocol']} protocol, seed {row['seed']}, "
        f"{row['selection']} (step {row['steps']}): score {float(row['value']):.1f}{margin}, "
        f"return {row['return']} ({row['episodes']} episodes, target {row['target']})"
    )
