"""The site of the documentation: it builds without a warning and no link in it is broken."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from primal_attention import ATTENTIONS

ROOT = Path(__file__).parents[1]
PACKAGES = [
    *("theory", "attention", "models", "patching", "tasks", "training", "timeseries"),
    *("analysis", "testing"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="pip install 'primal-attention[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-c", "docs", "-d", folder / "doctrees", ".", folder / "html"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_no_link_is_broken(site):
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'\bid="([^"]*)"', text)) for page, text in texts.items()}
    broken = []
    for page, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="(?!https?:|data:|mailto:)([^"]*)"', text)):
            path, _, anchor = unquote(link.partition("?")[0]).partition("#")
            found = (page.parent / path).resolve() if path else page
            if not found.exists() or (anchor and anchor not in names.get(found, anchor)):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img)[^>]*"(?:https?:)?//[^>]*>', page.read_text())
        assert fetched == [], page


def test_the_reference_has_every_public_name(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    known = {name for kind in inventory.data for name in inventory.data[kind]}
    wanted = {
        f"primal_attention.{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(f"primal_attention.{package}").__all__
    }
    wanted |= {f"{each.__module__}.{each.__name__}" for each in ATTENTIONS.values()}
    assert sorted(wanted - known) == []
