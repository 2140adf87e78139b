"""The pages of the project and the commands on them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "reproduction").rglob("README.md")),
    *sorted((ROOT / "primal_attention").rglob("README.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
COMMAND = re.compile(r"(primal|python|pytest|make)(?=\s|$)(?! =)")


def name_of(page):
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def blocks_of(page, *kinds):
    """The bodies of the fenced blocks of some kinds."""
    return [body for kind, body in FENCED.findall(page.read_text()) if kind in kinds]


def commands_in_blocks(page):
    """The lines of blocks that are no Python, that begin with a command."""
    joined = (block.replace("\\\n", " ") for block in blocks_of(page, "", "text"))
    return [line for block in joined for line in block.splitlines() if COMMAND.match(line)]


def commands_of(page):
    """Those, and code in the text that begins with a command."""
    text = FENCED.sub("", page.read_text())
    quoted = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    return [*commands_in_blocks(page), *(code for code in quoted if COMMAND.match(code))]
