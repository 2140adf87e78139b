"""`primal settings`: what `--set` can change, and the values of a recipe."""

import typer

from primal_attention.attention import options_of
from primal_attention.cli.arguments import Model, Protocol, TaskName, recipe_of
from primal_attention.models.stacks import mechanism_of


def settings(
    task: TaskName,
    model: Model = "primalformer",
    protocol: Protocol = "clean",
) -> None:
    """List the settings of a recipe as key=value, ready for --set."""
    recipe = recipe_of(task, model, protocol, 0, ())
    values = recipe.flat()
    for name in ("task", "model", "protocol", "seed"):  # these have options of their own
        del values[name]
    chosen = values.pop("attention")
    for name, option in options_of(mechanism_of(model)).items():
        values[f"attention.{name}"] = chosen.get(name, option.default)
    for name, value in values.items():
        typer.echo(f"{name}={value}")
