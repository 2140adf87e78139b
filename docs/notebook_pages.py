"""Notebooks as pages of the site: their text, their code and the outputs that they hold."""

import json
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser

FENCE = "`" * 4  # longer than any fence inside a cell


class NotebookParser(MystParser):
    """Reads a notebook as the Markdown that says the same."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document of a page."""
        super().parse(markdown_of(json.loads(inputstring)), document)


def markdown_of(notebook: dict[str, Any]) -> str:
    """All cells, one after the other."""
    return "\n\n".join(part for cell in notebook["cells"] for part in parts_of(cell))


def parts_of(cell: dict[str, Any]) -> list[str]:
    """The text of a cell, or its code and what came out of it."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [fenced(source, "python"), *map(shown, cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    """An output: a picture where there is one, text otherwise."""
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join("".join(data["image/png"]).split())
        return f"![output](data:image/png;base64,{encoded})"
    return fenced("".join(output.get("text", data.get("text/plain", ""))), "text")


def fenced(text: str, language: str) -> str:
    """A block of code."""
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"
