"""The command line, `primal`. It needs the extra `cli`: Typer and Rich, imported when it is run."""

from importlib import import_module, metadata
from typing import Annotated, Any

_COMMANDS = (  # each is the function of its name in the module of its name; --help keeps the order
    *("train", "evaluate", "predict", "generate", "rollout", "table", "sweep", "settings"),
    *("data", "check", "bench", "spectrum", "report"),
)


def main() -> None:
    """Run the script `primal`."""
    try:
        app()()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        message = f"primal needs {error.name}: pip install 'primal-attention[cli]'"
        raise SystemExit(message) from None


def app() -> Any:
    """Build the Typer application."""
    import typer

    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @program.callback(invoke_without_command=True)
    def primal(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        """Attention as a kernel machine. Each command explains itself: primal train --help."""
        if version:
            typer.echo(f"primal-attention {metadata.version('primal-attention')}")
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for name in _COMMANDS:
        module = import_module(f"primal_attention.cli.{name}")
        program.command()(getattr(module, name))
    return program
