"""Tables as text."""

from collections.abc import Sequence


def text_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Format a title and indented rows whose cells are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])
