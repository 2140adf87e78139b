"""The command line, `primal`. It needs the extra `cli`: Typer and Rich, imported when it is run."""

from importlib import import_module, metadata
from typing import Annotated, Any

_COMMANDS = (  # each is the function of its name in the module of its name; --help keeps the order
    *("train", "evaluate", "predict", "generate", "rollout", "table", "sweep", "settings"),
    *("data", "check", "bench", "spectrum", "report"),
)
_NEXT = """\
[bold]Attention as a kernel machine.[/] What to try next:

[green]primal train uea/JapaneseVowels --model primalformer --set epochs=10[/]
    train; with aeon installed this set needs no download
[green]primal evaluate runs/uea/JapaneseVowels/primalformer/clean/[/]...
    measure what was trained
[green]primal predict FILE.ts --checkpoint runs/[/]...
    classify time series of your own
[green]primal generate runs/language/wikitext-2/primalformer/clean/[/]... "The game"
    write words with a language model
[green]primal rollout runs/rl/hopper-medium/primal_plus/clean/[/]...
    act in the environment with what was trained
[green]primal spectrum runs/uea/JapaneseVowels/primalformer/clean/[/]...
    what its attention does: spectra, effective ranks, a figure
[green]primal report runs/uea/JapaneseVowels/primalformer/clean/[/]...
    all about a run on one page, or about several beside each other
[green]primal table uea[/]
    the paper's table beside our runs
[green]primal sweep uea/JapaneseVowels --model primalformer[/]
    search for better settings
[green]primal settings uea/JapaneseVowels[/]
    what --set can change
[green]primal data[/]
    which data sets there are, and where
[green]primal check torch.nn:MultiheadAttention[/]
    hold anyone's attention to the contract
[green]primal bench[/]
    time and memory of the mechanisms on this machine

Every command explains itself: [green]primal train --help[/]"""


def main() -> None:
    """Run the script `primal`."""
    try:
        program = app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        message = f"primal needs {error.name}: pip install 'primal-attention[cli]'"
        raise SystemExit(message) from None
    program()


def app() -> Any:
    """Build the Typer application."""
    import typer
    from rich.console import Console
    from rich.panel import Panel

    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @program.callback(invoke_without_command=True)
    def primal(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        """Attention as a kernel machine."""
        if version:
            typer.echo(f"primal-attention {metadata.version('primal-attention')}")
        elif context.invoked_subcommand is None:
            console = Console(highlight=False)
            console.print(Panel(_NEXT, title="primal", expand=False, padding=(1, 2)))

    for name in _COMMANDS:
        module = import_module(f"primal_attention.cli.{name}")
        program.command()(getattr(module, name))
    return program
