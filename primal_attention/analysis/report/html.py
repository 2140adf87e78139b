"""Pieces of an HTML page. Text becomes part of a page escaped, whoever wrote it."""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from primal_attention.analysis.report.style import STYLE

_NOTHING_FROM_OUTSIDE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


class Picture(NamedTuple):
    """A drawing for a light page and for a dark one, as addresses that hold the data."""

    light: str
    dark: str


class Section(NamedTuple):
    """A part of a chapter."""

    anchor: str
    title: str
    body: Html


class Chapter(NamedTuple):
    """What is said of one thing; its title is left out where it is the only one."""

    anchor: str
    title: str
    sections: Sequence[Section]


def element(tag: str, *children: str, **attributes: str) -> Html:
    """An element; children that are not ``Html`` are escaped. ``class_`` stands for ``class``."""
    names = {name.removesuffix("_").replace("_", "-"): each for name, each in attributes.items()}
    start = "".join(f' {name}="{html.escape(each)}"' for name, each in names.items())
    return Html(f"<{tag}{start}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """One piece after the other."""
    return Html("".join(_markup(child) for child in children))


def _markup(child: str) -> str:
    return str(child) if isinstance(child, Html) else html.escape(child)


def paragraph(*children: str) -> Html:
    """A paragraph."""
    return element("p", *children)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> Html:
    """A table that scrolls by itself where it is too wide; its first column stays."""
    head = element("tr", *(element("th", name, scope="col") for name in columns))
    lines = (_row(cells) for cells in rows)
    title = element("caption", caption)
    inner = element("table", title, element("thead", head), element("tbody", *lines))
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _row(cells: Sequence[str]) -> Html:
    first, *rest = (cell.replace(" ± ", "\u00a0±\u00a0") for cell in cells)
    return element("tr", element("th", first, scope="row"), *(element("td", c) for c in rest))


def figure(picture: Picture, caption: str) -> Html:
    """A drawing with words below it."""
    dark = "(prefers-color-scheme: dark)"
    source = Html(f'<source media="{dark}" srcset="{html.escape(picture.dark)}">')
    image = Html(f'<img src="{html.escape(picture.light)}" alt="{html.escape(caption)}">')
    return element("figure", element("picture", source, image), element("figcaption", caption))


def figures(drawn: Iterable[tuple[Picture, str]]) -> Html:
    """Drawings beside each other where there is room."""
    return side_by_side([figure(*each) for each in drawn])


def side_by_side(pieces: Iterable[Html]) -> Html:
    """Pieces beside each other where there is room."""
    return element("div", *pieces, class_="figures")


def cards(facts: Iterable[tuple[str, str, str]]) -> Html:
    """Numbers to see first: a name, a number, a word about it."""
    return element("dl", *(_card(*each) for each in facts), class_="cards")


def _card(name: str, number: str, note: str) -> Html:
    inner = element("dt", name), element("dd", number), element("dd", note, class_="note")
    return element("div", *inner)


def details(summary: str, body: Html) -> Html:
    """Something that is opened by a click."""
    return element("details", element("summary", summary), body)


def page(title: str, subtitle: str, headline: Html, chapters: Sequence[Chapter]) -> str:
    """The whole page, in ASCII: no reader has to guess its encoding."""
    top = element("header", element("h1", title), element("p", subtitle, class_="subtitle"))
    alone = len(chapters) == 1
    body = (_chapter(each, alone=alone) for each in chapters)
    main = element("main", headline, _contents(chapters, alone=alone), *body)
    head = (
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_OUTSIDE}">'),
        element("title", f"{title}, {subtitle}"),
        element("style", Html(STYLE)),
    )
    whole = element("html", element("head", *head), element("body", top, main), lang="en")
    text = f"<!DOCTYPE html>\n{whole}\n"
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _contents(chapters: Sequence[Chapter], *, alone: bool) -> Html:
    lists = [_links((each.anchor, each.title) for each in one.sections) for one in chapters]
    if alone:
        return element("nav", *lists, aria_label="Contents")
    links = [element("a", each.title, href=f"#{each.anchor}") for each in chapters]
    items = (element("li", *pair) for pair in zip(links, lists, strict=True))
    return element("nav", element("ol", *items, class_="chapters"), aria_label="Contents")


def _links(places: Iterable[tuple[str, str]]) -> Html:
    items = (element("li", element("a", title, href=f"#{anchor}")) for anchor, title in places)
    return element("ul", *items)


def _chapter(chapter: Chapter, *, alone: bool) -> Html:
    title = Html("") if alone else element("h2", chapter.title)
    heading = "h2" if alone else "h3"
    sections = (
        element("section", element(heading, each.title), each.body, id=each.anchor)
        for each in chapter.sections
    )
    return element("article", title, *sections, id=chapter.anchor)
