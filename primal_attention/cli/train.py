"""`primal train`: a recipe in a directory of its own."""

import logging
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from primal_attention.cli import arguments
from primal_attention.distributed.context import check_shardable
from primal_attention.foreign_files import UnreadableFileError
from primal_attention.training import Outcome, Watcher, finish, launch, progress_bar, train_in
from primal_attention.training.checkpoint import BEST, LAST
from primal_attention.training.context import context_mesh
from primal_attention.training.devices import LostPeerError, from_first, with_peers
from primal_attention.training.loggers import build_logger
from primal_attention.training.model_factory import build_model
from primal_attention.training.results import add_rows, current_commit, read_rows, row_of
from primal_attention.training.run_directory import RESULT, directory_of
from primal_attention.training.tables import RESULTS, printed_in


def train(  # noqa: PLR0913 - each is an option of the command
    task: arguments.TaskName,
    model: arguments.Model,
    protocol: arguments.Protocol = "clean",
    seed: arguments.Seed = 0,
    set_: arguments.Settings = None,
    out: arguments.Runs = Path("runs"),
    data: arguments.Data = None,
    accelerator: arguments.Accelerator = "auto",
    devices: Annotated[
        str | None, typer.Option(help="How many; default: 1, or those of torchrun.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="auto, ddp or fsdp.")] = "auto",
    num_nodes: Annotated[
        int | None, typer.Option(help="Machines; default: 1, or those of torchrun.")
    ] = None,
    context_parallel: Annotated[
        int, typer.Option(min=1, help="Processes that share the tokens of each case.")
    ] = 1,
    logger: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; may be repeated.")
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    quiet: arguments.Quiet = False,
) -> None:
    """Train a recipe; the same command again goes on where it was interrupted."""
    recipe = arguments.recipe_of(task, model, protocol, seed, set_ or ())
    cases = arguments.load_task_of_model(recipe, data)
    directory = directory_of(out, recipe)
    arguments.check_directory(directory, recipe)
    with arguments.naming("--out"):
        read_rows(out / RESULTS)  # the row of this run is to go there
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    with arguments.naming("--logger"):
        loggers = [build_logger(name, directory, recipe.flat()) for name in logger or ()]
    with arguments.naming("--devices, --accelerator, --strategy or --set precision"):
        fabric = launch(
            recipe.run.precision,
            accelerator=accelerator,
            devices=devices or os.environ.get("LOCAL_WORLD_SIZE", "1"),
            num_nodes=num_nodes or int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            strategy=strategy,
            loggers=loggers,
        )
    with arguments.naming("--context-parallel or --set"):
        context = context_mesh(fabric, context_parallel)
        if context is not None:
            with torch.device("meta"):
                check_shardable(build_model(recipe, cases.sizes))
    console = Console(stderr=True, quiet=quiet or not fabric.is_global_zero)
    console.print(_where(directory), highlight=False, soft_wrap=True)
    watcher = Watcher() if quiet else progress_bar(console)
    with resumable(directory, silent=not fabric.is_global_zero), with_peers(fabric):
        outcome = train_in(
            directory,
            recipe,
            cases,
            fabric,
            watcher=watcher,
            save_every=save_every,
            context=context,
        )
        row = [row_of(outcome, current_commit())]
        from_first(fabric, lambda: add_rows(out / RESULTS, row))
        if fabric.is_global_zero:
            _print_outcome(outcome, directory, data)
        finish(fabric)


def _where(directory: Path) -> str:
    """Describe what is in the directory already."""
    if (directory / RESULT).exists():
        return f"{directory}: this run is over; its outcome is read"
    if (directory / LAST).exists():
        return f"{directory}: going on from the last checkpoint"
    return f"{directory}: a new run"


@contextmanager
def resumable(directory: Path, *, silent: bool = False) -> Iterator[None]:
    """Tell what to do after a run that was stopped: by its user, its numbers, a file or a peer.

    Args:
        directory: Where the run is.
        silent: Say nothing of what the first process says too.
    """

    def end(code: int, text: str) -> NoReturn:
        if not silent:
            typer.echo(text, err=True)
        raise typer.Exit(code) from None

    goes_on = f"the same command goes on from the last checkpoint in {directory}"
    hook, threading.excepthook = threading.excepthook, _tell_of_thread
    try:
        yield
    except KeyboardInterrupt:
        end(130, f"stopped; {goes_on}")
    except FloatingPointError as error:
        end(1, f"Error: {error}")
    except LostPeerError as error:
        typer.echo(f"Error: {error}; {goes_on}", err=True)
        sys.stdout.flush()
        os._exit(1)  # at a usual exit the process group complains of its lost peers too
    except (OSError, UnreadableFileError) as error:
        end(2, f"Error: {error}")
    finally:
        threading.excepthook = hook


def _tell_of_thread(error: threading.ExceptHookArgs) -> None:
    """Leave errors of writing to the training thread, which raises them by the file's name."""
    if not isinstance(error.exc_value, OSError):
        threading.__excepthook__(error)


def _print_outcome(outcome: Outcome, directory: Path, data: Path | None) -> None:
    on_test = outcome.recipe.data.valid_fraction is None
    unit = outcome.recipe.optim.unit
    selection = f"best {unit} on {'the test' if on_test else 'validation'} cases"
    place = outcome.rounds[outcome.best][unit]
    checkpoint = directory / BEST
    printed = printed_in(Path("reproduction"), outcome.recipe)
    command = ["primal", "evaluate", str(checkpoint), *(["--data", str(data)] if data else [])]
    rows = {
        f"test {outcome.metric}": f"{outcome.value:.2f}",
        **({"the paper": "{} ({})".format(*printed)} if printed else {}),
        "selection": f"{selection} ({outcome.valid:.2f}, {unit} {place})",
        "time": f"{outcome.seconds:.1f} s, {outcome.steps} steps on {outcome.device}",
        "checkpoint": str(checkpoint),
        "evaluate it": shlex.join(command),
    }
    console = Console(highlight=False, soft_wrap=True)
    for name, value in rows.items():
        console.print(f"[bold]{name:17}[/]{value}")
