"""The Python snippets of the README and of the documents run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{document.name}-{i}")
    for document in DOCUMENTS
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.S))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet, capsys):
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_links_between_documents_exist():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_commands_of_the_readme_name_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"python (benchmarks/\w+\.py|examples/\w+\.py)", text):
        assert (ROOT / path).exists()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M)
