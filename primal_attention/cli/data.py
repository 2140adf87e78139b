"""`primal data`: which data sets there are, and preparing them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from primal_attention.cli.mistakes import naming
from primal_attention.cli.rl_data import make_sets
from primal_attention.tasks import (
    IMAGE_SETS,
    LANGUAGE_SETS,
    LRA_TASKS,
    RL_SETS,
    UEA_SETS,
    find_images,
    find_language,
    find_lra,
    find_rl,
    find_uea,
    prepare_images,
    prepare_language,
    prepare_lra,
    prepare_rl,
    prepare_uea,
)
from primal_attention.training.recipe import nearest

if TYPE_CHECKING:
    from typer import Typer


class Domain(NamedTuple):
    """The data sets of a domain."""

    names: Sequence[str]
    find: Callable[[str, Path | None], Path | None]
    prepare: Callable[[str, Path | None, Path | None], Path]
    missing: str  # what is said of a set that is not at hand


def _prepare_lra(name: str, folder: Path | None, out: Path | None) -> Path:
    return prepare_lra(name, folder, out, workers=os.cpu_count() or 1)


_DOMAINS = {
    "uea": Domain(UEA_SETS, find_uea, prepare_uea, "to be downloaded"),
    "lra": Domain(LRA_TASKS, find_lra, _prepare_lra, "not at hand"),
    "language": Domain(LANGUAGE_SETS, find_language, prepare_language, "not at hand"),
    "rl": Domain(RL_SETS, find_rl, prepare_rl, "not at hand"),
    "images": Domain(IMAGE_SETS, find_images, prepare_images, "not at hand"),
}


def register(program: "Typer") -> None:
    """Add the command."""
    import rich.console
    import typer

    @program.command()
    def data(
        domain: Annotated[
            str | None, typer.Argument(help="uea, lra, language, rl, images; default: all.")
        ] = None,
        names: Annotated[
            list[str] | None, typer.Argument(help="Sets to prepare; default: all at hand.")
        ] = None,
        folder: Annotated[
            Path | None,
            typer.Option(help="Of the files; default: the domain's in data, or in $PRIMAL_DATA."),
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Of the prepared files.")] = None,
        agents: Annotated[
            Path | None, typer.Option(help="rl: make sets with the policies in this folder.")
        ] = None,
        transitions: Annotated[int, typer.Option(help="rl: of each set made.", min=1)] = 100_000,
        seed: Annotated[int, typer.Option(help="rl: of each set made.", min=0)] = 0,
    ) -> None:
        """List the data sets and where they are, or prepare some so that they load fast."""
        console = rich.console.Console(highlight=False, soft_wrap=True)
        if domain is None:
            _print_sets(console, folder)
            return
        with naming("DOMAIN"):
            if domain not in _DOMAINS:
                raise ValueError(f"no domain is called {domain!r}; {nearest(domain, _DOMAINS)}")
        if agents is not None:
            with naming("DOMAIN, NAMES or --agents"):
                make_sets(console, domain, names, agents, out or folder, transitions, seed)
            return
        with naming("NAMES or --folder"):
            _prepare(console, _DOMAINS[domain], names, folder, out)


def _print_sets(console: Any, folder: Path | None) -> None:
    for domain, (names, find, _, missing) in _DOMAINS.items():
        for name in names:
            console.print(f"{f'{domain}/{name}':32}{find(name, folder) or f'[dim]{missing}[/]'}")
    console.print("\nprimal data uea NAME downloads a set if need be, and prepares it")
    console.print("primal data lra NAME reads or generates a task, and prepares it")
    console.print("primal data language NAME reads a text, and prepares it")
    console.print("primal data images NAME packs a folder of pictures into one file")
    console.print("primal data rl NAME --agents FOLDER rolls out policies, and prepares that")


def _prepare(
    console: Any, domain: Domain, names: list[str] | None, folder: Path | None, out: Path | None
) -> None:
    from rich.console import Console
    from rich.progress import track

    places = {name: domain.find(name, folder) for name in domain.names}
    found = [name for name, place in places.items() if place and place.name != f"{name}.npz"]
    if not (names or found):
        raise FileNotFoundError("no files of any set are at hand; name those to prepare")
    shown = Console(stderr=True)
    for name in track(names or found, "preparing", transient=True, console=shown):
        console.print(str(domain.prepare(name, folder, out)))
