"""What is said of mistakes: the argument, what was received, what to do; never a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

_EXTRAS = {  # what is imported on the way, and the extra that brings it
    "lightning_fabric": "train",
    "optuna": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "aeon": "timeseries",
}


@contextmanager
def naming(argument: str | None = None) -> Iterator[None]:
    """Say what is wrong with an argument, and exit with 2; for what comes before long work."""
    import typer

    try:
        yield
    except ModuleNotFoundError as error:
        raise typer.BadParameter(_what_to_install(error)) from error
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint=argument) from error


def _what_to_install(error: ModuleNotFoundError) -> str:
    name = (error.name or "").partition(".")[0]
    if "pip install" in str(error) or name not in _EXTRAS:
        return str(error)
    return f"this needs {name}: pip install 'primal-attention[{_EXTRAS[name]}]'"
