"""`primal data`: which data sets there are, and preparing them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from primal_attention.cli.arguments import naming
from primal_attention.training import DOMAINS, Domain, find_domain


def data(
    domain: Annotated[
        str | None, typer.Argument(help=f"{', '.join(DOMAINS)}; default: all.")
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
    console = Console(highlight=False, soft_wrap=True)
    if domain is None:
        _print_sets(console, folder)
        return
    with naming("DOMAIN"):
        found = find_domain(domain)
    with naming("NAMES or --folder"):
        _prepare(console, found, names, folder, out)


def _print_sets(console: Any, folder: Path | None) -> None:
    for name, domain in DOMAINS.items():
        for each in domain.sets:
            place = domain.find(each, folder) or f"[dim]{domain.missing}[/]"
            console.print(f"{f'{name}/{each}':32}{place}")
    console.print()
    for name, domain in DOMAINS.items():
        if domain.prepare is not None:
            console.print(f"primal data {name} NAME {domain.usage}")


def _prepare(
    console: Any, domain: Domain, names: list[str] | None, folder: Path | None, out: Path | None
) -> None:
    if domain.prepare is None:
        raise ValueError("the sets of this domain are read from their files, and not prepared")
    places = {name: domain.find(name, folder) for name in domain.sets}
    found = [name for name, place in places.items() if place and place.name != f"{name}.npz"]
    if not (names or found):
        raise FileNotFoundError("no files of any set are at hand; name those to prepare")
    shown = Console(stderr=True)
    for name in track(names or found, "preparing", transient=True, console=shown):
        console.print(str(domain.prepare(name, folder, out)))
