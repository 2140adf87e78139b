"""Optional dependencies, imported where they are first needed."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Name the extra of this package that brings a module which an import does not find.

    Args:
        what: Who needs what, for the message.
        extra: The name of the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{what}: pip install 'primal-attention[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
