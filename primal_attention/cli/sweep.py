"""`primal sweep`: search for settings."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from primal_attention.cli import arguments
from primal_attention.cli.train import resumable
from primal_attention.training import Watcher, launch, progress_bar, sweeps, train_in
from primal_attention.training.recipe import Recipe
from primal_attention.training.run_directory import directory_of

_TRIALS = 30


def sweep(  # noqa: PLR0913 - each is an option of the command
    task: arguments.TaskName,
    model: arguments.Model,
    trials: Annotated[
        int, typer.Option(min=1, help="Of the whole study; a grid has no more than it has.")
    ] = _TRIALS,
    sampler: Annotated[str, typer.Option(help="grid (of the paper) or tpe.")] = "grid",
    protocol: arguments.Protocol = "clean",
    seed: arguments.Seed = 0,
    set_: arguments.Settings = None,
    study: Annotated[
        str | None, typer.Option(help="Its name; default: from task, model and sampler.")
    ] = None,
    out: arguments.Runs = Path("runs"),
    data: arguments.Data = None,
    accelerator: arguments.Accelerator = "auto",
    quiet: arguments.Quiet = False,
) -> None:
    """Search for settings on validation cases; run it again, or several at once, to go on."""
    recipe = arguments.recipe_of(task, model, protocol, seed, set_ or ())
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    with arguments.naming("--protocol or --set valid_fraction"):
        if protocol == "clean" and recipe.data.valid_fraction is None:
            raise ValueError(
                "valid_fraction=none would choose settings on the test cases; "
                "--protocol paper does that openly"
            )
    if protocol == "paper":
        console.print("warning: the paper's protocol selects settings on the test cases")
    with arguments.naming("--sampler"):
        space = sweeps.space_of(sampler, model)
    cases = arguments.load_task_of_model(recipe, data)
    name = study or "-".join([*task.split("/"), model, protocol, f"seed{seed}", sampler])
    folder = out / "sweeps" / name
    with arguments.naming("--study or --out"):
        higher_is_better = cases.goal.higher_is_better
        opened = sweeps.open_study(folder, recipe, space, higher_is_better=higher_is_better)
    console.print(f"{folder}: {len(sweeps.trials_in(opened, 'COMPLETE'))} trials are done")
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)

    def run(settings: Sequence[str]) -> float:
        trial = recipe.with_settings(settings)
        watcher = Watcher() if quiet else progress_bar(console)
        fabric = launch(trial.run.precision, accelerator=accelerator, devices=1)
        outcome = train_in(directory_of(folder, trial), trial, cases, fabric, watcher=watcher)
        console.print(f"{' '.join(settings)}: {outcome.valid:.2f}")
        return outcome.valid

    with resumable(folder):
        sweeps.run_trials(opened, space, trials, run)
    _print_best(opened, recipe, set_ or ())


def _print_best(study: Any, recipe: Recipe, settings: Sequence[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    done, others = len(sweeps.trials_in(study, "COMPLETE")), len(sweeps.trials_in(study, "RUNNING"))
    if others:
        console.print(f"{others} trials are under way in other processes")
    if not done:
        console.print("no trial has a value yet")
        return
    best = study.best_trial
    command = ["primal", "train", recipe.task, "--model", recipe.model.name]
    command += ["--protocol", recipe.run.protocol, "--seed", str(recipe.run.seed)]
    for setting in [*settings, *sweeps.as_settings(best.params)]:
        command += ["--set", setting]
    where = "test" if recipe.data.valid_fraction is None else "validation"
    console.print(
        f"{done} trials; the best, trial {best.number}, has "
        f"{best.value:.2f} on the {where} cases:\n{shlex.join(command)}"
    )
