"""The blocks of a page and their rendering. Text is escaped, whoever wrote it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple


class Picture(NamedTuple):
    """A drawing for a light page and for a dark one, as addresses that hold the data."""

    light: str
    dark: str


@dataclass(frozen=True)
class Cards:
    """Numbers to see first: a name, a number, a word about it."""

    facts: Iterable[tuple[str, str, str]]
    kind: ClassVar = "cards"


@dataclass(frozen=True)
class DataTable:
    """A table that scrolls by itself where it is too wide; its first column stays."""

    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    caption: str
    kind: ClassVar = "table"


@dataclass(frozen=True)
class Illustration:
    """A drawing with a caption."""

    picture: Picture
    caption: str
    kind: ClassVar = "figure"


@dataclass(frozen=True)
class Beside:
    """Blocks beside each other where there is room."""

    blocks: "Sequence[Block]"
    kind: ClassVar = "beside"


@dataclass(frozen=True)
class Details:
    """Blocks that a click opens."""

    summary: str
    blocks: "Sequence[Block]"
    kind: ClassVar = "details"


Block = str | Cards | DataTable | Illustration | Beside | Details
"""A string is a paragraph."""


class Section(NamedTuple):
    """A part of a chapter."""

    anchor: str
    title: str
    blocks: Sequence[Block]


class Chapter(NamedTuple):
    """A run, or the comparison of runs; its title is left out where it is the only one."""

    anchor: str
    title: str
    sections: Sequence[Section]


def page(title: str, subtitle: str, headline: Sequence[Block], chapters: Sequence[Chapter]) -> str:
    """Render the whole page, in ASCII: no reader has to guess its encoding."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    content = {"title": title, "subtitle": subtitle, "headline": headline, "chapters": chapters}
    text = environment.get_template("page.html").render(content)
    text = text.replace(" ± ", "\u00a0±\u00a0")
    return text.encode("ascii", "xmlcharrefreplace").decode()
