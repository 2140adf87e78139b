"""Checks of constructor options, shared by all mechanisms."""

from collections.abc import Collection
from difflib import get_close_matches
from numbers import Integral


def check_sizes(**sizes: int | None) -> None:
    """Raise unless each given size is a positive integer."""
    for name, size in sizes.items():
        whole = isinstance(size, Integral) and not isinstance(size, bool)
        if size is not None and (not whole or size < 1):
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_heads(dim: int, num_heads: int) -> int:
    """Return the head dimension; raise unless the heads divide the model dimension."""
    check_sizes(dim=dim, num_heads=num_heads)
    if dim % num_heads:
        raise ValueError(f"dim must be a multiple of num_heads, got dim={dim}, {num_heads=}")
    return dim // num_heads


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{hint}")


def check_probabilities(**probabilities: float) -> None:
    """Raise unless each is in [0, 1)."""
    for name, value in probabilities.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {value}")
