"""What the README and the documents say: snippets run, links lead somewhere, commands exist."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

import primal_attention
from primal_attention.training.tables import find_expected

from .pages import FENCED, PAGES, ROOT, blocks_of, commands_of, name_of

SNIPPETS = [
    pytest.param(body, id=f"{name_of(page)}-{i}")
    for page in PAGES
    for i, body in enumerate(blocks_of(page, "python"))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet, capsys, monkeypatch, request):
    name = re.sub(r"\W", "_", request.node.name)
    module = ModuleType(name)  # torch.compile looks the module of a function up, and keeps it
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(snippet, name, "exec"), vars(module))


def anchors_of(page):
    """The headings of a page as GitHub and the site name them in links."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(found), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def primal():
    import typer

    from primal_attention.cli import app

    return typer.main.get_command(app())


def check_primal(command, words):
    """Each word that names a command does, and the command has all the options."""
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{command.name} has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {"--help"}.union(*(parameter.opts for parameter in command.params))
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in known, f"{command.name} has no {option}"


def check_make(words):
    makefile = (ROOT / "Makefile").read_text()
    for target in words:
        assert re.search(rf"^{target}:", makefile, re.M), f"there is no make {target}"


def check_paths(words):
    """The program, tests and plans exist; so does the folder of a table that is to be run."""
    path = re.compile(r"tests\b|[\w/]+\.py$|reproduction/\w+\.toml$")
    paths = [word.partition("::")[0] for word in words if path.match(word)]
    if words[0] == "reproduction/run.py" and re.fullmatch(r"[a-z][a-z0-9_/]*", words[1]):
        paths.append(f"reproduction/{words[1]}")
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page, primal):
    for command in commands_of(page):
        program, *words = shlex.split(command, comments=True)
        if program == "primal":
            check_primal(primal, words)
            if words[:1] == ["table"] and words[1:] and words[1].islower():
                find_expected(words[1], ROOT / "reproduction")
        elif program == "make":
            check_make([word for word in words if word.islower()])
        elif words:
            check_paths(words)


PROGRAMS = sorted(
    {
        command.partition(" #")[0].strip()
        for page in PAGES
        for command in commands_of(page)
        if re.match(r"python [\w/]+\.py", command)
    }
)


class ParsedError(Exception):
    """The options of a program were taken."""


@pytest.mark.parametrize("command", PROGRAMS)
def test_programs_take_their_options(command, monkeypatch):
    _, program, *words = shlex.split(command)
    if "parse_arg" not in (ROOT / program).read_text():
        assert not words, f"{program} takes no options"
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(sys, "argv", [program, *words])
        patch.setattr(sys, "path", [str((ROOT / program).parent), *sys.path])
        before = {*sys.modules}
        with pytest.raises(ParsedError):
            runpy.run_path(str(ROOT / program), run_name="__main__")
    for name in {*sys.modules} - before:  # programs have modules of the same name beside them
        file = getattr(sys.modules[name], "__file__", None) or ""
        if Path(file).parent in ((ROOT / program).parent, ROOT / "reproduction"):
            del sys.modules[name]


def toctree_entries(page):
    """The pages that a page has in its tables of contents, as paths; wildcards are resolved."""
    bodies = re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.S | re.M)
    for line in "\n".join(bodies).splitlines():
        name = re.sub(r".*<(.*)>", r"\1", line)
        if name and not name.startswith(":"):
            yield from (path.resolve() for path in page.parent.glob(f"{name}.md"))


def test_every_page_is_in_the_table_of_contents():
    listed = {path for page in (ROOT / "docs").rglob("*.md") for path in toctree_entries(page)}
    left_out = {ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs/index.md"}
    assert sorted(str(page) for page in {*PAGES} - listed - left_out) == []


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.M) == [primal_attention.__version__]


TABLES = runpy.run_path(str(ROOT / "docs/make_tables.py"))
MADE = [page for page in TABLES["pages"]() if "<!-- table" in page.read_text()]


@pytest.mark.parametrize("page", MADE, ids=name_of)
def test_numbers_of_a_page_are_those_of_the_rows(page):
    assert TABLES["filled"](page.read_text()) == page.read_text(), "run docs/make_tables.py"


def test_a_changed_number_is_noticed():
    text = (ROOT / "README.md").read_text()
    number = re.search(r"^\| softmax attention.*?(\d+\.\d+)", text, re.M)[1]
    assert TABLES["filled"](text.replace(number, "0.01")) == text


def test_every_environment_variable_is_on_its_page():
    code = "".join(path.read_text() for path in (ROOT / "primal_attention").rglob("*.py"))
    page = (ROOT / "docs/environment.md").read_text()
    read = re.compile(r'environ(?:\.get\(|\[)?\W*"(PRIMAL_\w+)"|"(PRIMAL_\w+)" in os\.environ')
    used = {name for found in read.findall(code) for name in found if name}
    assert used == set(re.findall(r"^\| `(PRIMAL_\w+)`", page, re.M))
