"""The ops and mechanisms stay small: their lines, parameters of functions, repeated lines."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "primal_attention"
LINES = {"ops": 7000, "attention": 4600}  # at most
MOST_PARAMETERS = 12
MOST_SHARED = 10  # lines that two places have in common
THIN = re.compile(r"[\s()\[\]{},:]*(# fmt: skip)?")  # lone punctuation


def files(part: str) -> list[Path]:
    return sorted((PACKAGE / part).rglob("*.py"))


@pytest.mark.parametrize("part", LINES)
def test_lines(part):
    assert sum(len(path.read_text().splitlines()) for path in files(part)) <= LINES[part]


def is_device_code(function: ast.FunctionDef) -> bool:
    return any(re.search("jit|launched", ast.unparse(each)) for each in function.decorator_list)


def long_signatures(source: str) -> list[str]:
    """Functions of the host with too many parameters."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not is_device_code(node):
            taken = node.args
            number = len(taken.posonlyargs + taken.args + taken.kwonlyargs)
            if number > MOST_PARAMETERS and node.name != "__init__":
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", files("ops"), ids=lambda path: path.stem)
def test_parameters(path):
    assert long_signatures(path.read_text()) == []


def code_lines(source: str) -> list[tuple[int, str]]:
    """Numbers and text of lines, without docstrings, comments, imports and lone punctuation."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
    return [
        (number, line)
        for number, line in lines
        if number not in skipped and not line.startswith("#") and not THIN.fullmatch(line)
    ]


def repeated(sources: dict[str, str], most: int = MOST_SHARED) -> list[str]:
    """Places that share more than so many lines in a row with an earlier one."""
    seen: dict[tuple[str, ...], str] = {}
    found = defaultdict(str)
    for name, source in sources.items():
        lines = code_lines(source)
        for first in range(len(lines) - most):
            run = tuple(line for _, line in lines[first : first + most + 1])
            place = f"{name}:{lines[first][0]}"
            if run in seen:
                found[place] = seen[run]
            seen.setdefault(run, place)
    return [f"{one} repeats {other}" for one, other in found.items()]


def test_nothing_is_written_twice():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in files("ops")}
    assert repeated(sources) == []


def test_what_is_too_long_is_seen():
    assert long_signatures(f"def f({', '.join(f'x{n}' for n in range(13))}): pass") == ["f"]
    assert not long_signatures(
        "@triton.jit\n" + f"def f({', '.join(f'x{n}' for n in range(13))}): 0"
    )
    body = "\n".join(f"x{n} = {n}" for n in range(11))
    assert repeated({"a": body, "b": "y = 1\n" + body}) == ["b:2 repeats a:1"]
    assert repeated({"a": body, "b": body.replace("x5", "z")}) == []
    assert repeated({"a": f'"""Text."""\n{body}\n# c\n{body}'}) == ["a:14 repeats a:2"]
