"""`primal data`: which data sets there are, and preparing them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from primal_attention.cli.mistakes import naming
from primal_attention.tasks import UEA_SETS, find_uea, prepare_uea
from primal_attention.tasks.uea import uea_folder
from primal_attention.training.recipe import nearest
from primal_attention.training.recipes import DOMAINS

if TYPE_CHECKING:
    from typer import Typer


def register(program: "Typer") -> None:
    """Add the command."""
    import rich.console
    import typer

    @program.command()
    def data(
        domain: Annotated[str | None, typer.Argument(help="uea; default: list all sets.")] = None,
        names: Annotated[
            list[str] | None, typer.Argument(help="Sets to prepare; default: all at hand.")
        ] = None,
        folder: Annotated[
            Path | None, typer.Option(help="Of the files; default: data/uea, or $PRIMAL_DATA/uea.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Of the prepared files.")] = None,
    ) -> None:
        """List the data sets and where they are, or prepare some so that they load fast."""
        console = rich.console.Console(highlight=False, soft_wrap=True)
        if domain is None:
            _print_sets(console, folder)
            return
        with naming("DOMAIN"):
            if domain not in DOMAINS:
                raise ValueError(f"no domain is called {domain!r}; {nearest(domain, DOMAINS)}")
        with naming("NAMES or --folder"):
            _prepare(console, names or _names_at_hand(folder), folder, out)


def _names_at_hand(folder: Path | None) -> list[str]:
    names = [name for name in UEA_SETS if find_uea(name, folder) is not None]
    if not names:
        raise FileNotFoundError(f"no set is in {uea_folder(folder)}; name those to download")
    return names


def _print_sets(console: Any, folder: Path | None) -> None:
    for name in UEA_SETS:
        place = find_uea(name, folder)
        console.print(f"{f'uea/{name}':32}{place or '[dim]to be downloaded[/]'}")
    console.print("\nprimal data uea NAME downloads a set if need be, and prepares it")


def _prepare(console: Any, names: list[str], folder: Path | None, out: Path | None) -> None:
    from rich.console import Console
    from rich.progress import track

    for name in track(names, "preparing", transient=True, console=Console(stderr=True)):
        console.print(str(prepare_uea(name, folder, out)))
