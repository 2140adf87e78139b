"""`primal data`: which data sets there are, and preparing them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from primal_attention.cli.mistakes import naming
from primal_attention.tasks import (
    LRA_TASKS,
    UEA_SETS,
    find_lra,
    find_uea,
    prepare_lra,
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
}


def register(program: "Typer") -> None:
    """Add the command."""
    import rich.console
    import typer

    @program.command()
    def data(
        domain: Annotated[
            str | None, typer.Argument(help="uea or lra; default: list all sets.")
        ] = None,
        names: Annotated[
            list[str] | None, typer.Argument(help="Sets to prepare; default: all at hand.")
        ] = None,
        folder: Annotated[
            Path | None,
            typer.Option(help="Of the files; default: the domain's in data, or in $PRIMAL_DATA."),
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Of the prepared files.")] = None,
    ) -> None:
        """List the data sets and where they are, or prepare some so that they load fast."""
        console = rich.console.Console(highlight=False, soft_wrap=True)
        if domain is None:
            _print_sets(console, folder)
            return
        with naming("DOMAIN"):
            if domain not in _DOMAINS:
                raise ValueError(f"no domain is called {domain!r}; {nearest(domain, _DOMAINS)}")
        with naming("NAMES or --folder"):
            _prepare(console, _DOMAINS[domain], names, folder, out)


def _print_sets(console: Any, folder: Path | None) -> None:
    for domain, (names, find, _, missing) in _DOMAINS.items():
        for name in names:
            console.print(f"{f'{domain}/{name}':32}{find(name, folder) or f'[dim]{missing}[/]'}")
    console.print("\nprimal data uea NAME downloads a set if need be, and prepares it")
    console.print("primal data lra NAME reads or generates a task, and prepares it")


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
