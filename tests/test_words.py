"""Docstrings, comments and pages follow the rules of words in CONTRIBUTING.md."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("primal_attention", "reproduction", "benchmarks", "examples", "docs")
OPENINGS = re.compile(r"(What|Whether|Of|Those|Who|Whose|Which|The same)\b")
PARAPHRASES = {  # the standard term of each is in CONTRIBUTING.md
    "synchronises": r"\b(is|are|be|was) waited for\b|\b(no one|nobody|nothing) waits\b",
    "frees": r"\blet(s|ting)? go( of)?\b",
    "overwrites, replaces": r"\btak(es?|ing|en) the place of\b",
    "available": r"\bat hand\b",
    "by default": r"\bunless told\b",
    "an upper bound": r"\bthe longest or more\b",
}


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def offenders(path: Path) -> Iterator[str]:
    """One line for each break of a rule: place, rule, text."""
    place = path.relative_to(ROOT)
    for line, text in docstrings_of(path):
        if OPENINGS.match(text):
            yield f"{place}:{line}: begin with a verb or a noun: {text.splitlines()[0]}"
    for line, text in (*docstrings_of(path), *comments_of(path)):
        for term, pattern in PARAPHRASES.items():
            found = re.search(pattern, " ".join(text.split()))
            if found:
                yield f"{place}:{line}: write '{term}' for '{found[0]}'"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_comments_follow_the_rules(room):
    files = sorted((ROOT / room).rglob("*.py"))
    found = [each for path in files for each in offenders(path)]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("text", ["What a map is.", "The same, in float64.", "Of both sides."])
def test_forbidden_openings_are_found(text):
    assert OPENINGS.match(text)


def test_standard_terms_are_in_the_rules():
    rules = (ROOT / "CONTRIBUTING.md").read_text()
    assert [term for term in PARAPHRASES if term not in rules] == []


def test_pages_use_standard_terms():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counts = Counter(
        f"{page.relative_to(ROOT)}: {found[0]}"
        for page in pages
        for text in [re.sub(r"^\|.*$", "", page.read_text(), flags=re.M)]
        for pattern in PARAPHRASES.values()
        for found in re.finditer(pattern, " ".join(text.split()))
    )
    assert counts == {}
