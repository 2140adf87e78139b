"""The content of a page and its rendering. Text is escaped, whoever wrote it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """A number to see first, and a word about it."""

    name: str
    number: str
    note: str


class Illustration(NamedTuple):
    """A drawing, as an address that holds the data, with a caption."""

    address: str
    caption: str


class DataTable(NamedTuple):
    """A table that scrolls by itself where it is too wide; its first column stays."""

    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    caption: str
    folded: bool = False  # opened by a click


class Section(NamedTuple):
    """Paragraphs, then drawings beside each other, then tables."""

    name: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Illustration] = ()
    tables: Sequence[DataTable] = ()


class Chapter(NamedTuple):
    """A run, or the comparison of runs; its title is left out where it is the only one."""

    anchor: str
    title: str
    facts: Sequence[Fact]
    text: Sequence[str]
    sections: Sequence[Section]


def render(title: str, subtitle: str, chapters: Sequence[Chapter]) -> str:
    """Render the whole page, in ASCII: no reader has to guess its encoding."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    template = environment.get_template("page.html")
    text = template.render(title=title, subtitle=subtitle, chapters=chapters)
    return text.replace(" ± ", "\u00a0±\u00a0").encode("ascii", "xmlcharrefreplace").decode()
