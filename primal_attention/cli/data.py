"""`primal data`: which data sets there are, and preparing them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, track

from primal_attention.cli.arguments import naming
from primal_attention.tasks.offline_rl import RL, RL_SETS, environment_of, make_set, rl_folder
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
    agents: Annotated[
        Path | None, typer.Option(help="rl: make sets with the policies in this folder.")
    ] = None,
    transitions: Annotated[int, typer.Option(help="rl: of each set made.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="rl: of each set made.", min=0)] = 0,
) -> None:
    """List the data sets and where they are, or prepare some so that they load fast."""
    console = Console(highlight=False, soft_wrap=True)
    if domain is None:
        _print_sets(console, folder)
        return
    with naming("DOMAIN"):
        found = find_domain(domain)
    if agents is not None:
        with naming("DOMAIN, NAMES or --agents"):
            _make_sets(console, domain, names, agents, out or folder, transitions, seed)
        return
    with naming("NAMES or --folder"):
        _prepare(console, found, names, folder, out)


def _print_sets(console: Any, folder: Path | None) -> None:
    for name, domain in DOMAINS.items():
        for each in domain.sets:
            place = domain.find(each, folder) or f"[dim]{domain.missing}[/]"
            console.print(f"{f'{name}/{each}':32}{place}")
    console.print()
    for name, domain in DOMAINS.items():
        console.print(f"primal data {name} NAME {domain.usage}")


def _prepare(
    console: Any, domain: Domain, names: list[str] | None, folder: Path | None, out: Path | None
) -> None:
    if domain.prepare is None:
        raise ValueError("the sets of this domain need no preparation")
    places = {name: domain.find(name, folder) for name in domain.sets}
    found = [name for name, place in places.items() if place and place.name != f"{name}.npz"]
    if not (names or found):
        raise FileNotFoundError("no files of any set are at hand; name those to prepare")
    shown = Console(stderr=True)
    for name in track(names or found, "preparing", transient=True, console=shown):
        console.print(str(domain.prepare(name, folder, out)))


def _make_sets(
    console: Any,
    domain: str,
    names: Sequence[str] | None,
    agents: Path,
    out: Path | None,
    transitions: int,
    seed: int,
) -> None:
    """Make the sets of those names, all by default; what was interrupted goes on."""
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
        console.print(f"{path}: {_described(path, name)}", markup=False)


def _described(path: Path, name: str) -> str:
    found = RL.read(path, name)
    facts = found.facts
    return (
        f"{facts['name']}, {len(found)} episodes, {len(found.rewards)} transitions, mean score "
        f"{facts['mean_score']} (best {facts['max_score']})"
    )
