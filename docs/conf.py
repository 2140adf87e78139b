"""How the site is built: `make docs`, or `sphinx-build -W -c docs . out/docs`.

The sources are the Markdown files of the repository as they are, so that links between them hold
here and wherever else they are read. Formulas are drawn by MathJax, which is copied into the site:
no page needs a network.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

from primal_attention import __version__

sys.path.append(str(Path(__file__).parent))
from filled_tables import filled_table  # beside this file
from notebook_pages import NotebookParser

MATHJAX = Path(*importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations)

project, author, release = "Primal Attention", "The Primal Attention developers", __version__
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
include_patterns = [
    "docs/**.md",
    "docs/notebooks/*.ipynb",
    "reproduction/**README.md",
    "primal_attention/ops/README.md",
    "primal_attention/ops/*/README.md",
    "CHANGELOG.md",
    "benchmarks/LOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "out", "data", "runs", "build", "dist"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = f"Primal Attention {release}"
html_static_path = ["site.css", str(MATHJAX / "static/mathjax/tex-svg.js")]
html_css_files = ["site.css"]
mathjax_path = "tex-svg.js"
html_copy_source = html_show_sourcelink = False

CODE = r"(?::[\w:]+:)?(`+)[^`]+\1"  # ``code``, `code` or :role:`target`
FORMULA = r"\$([^$]+)\$"
BAR = r"\|"


def setup(app: Sphinx) -> None:
    """Docstrings are written for people: formulas in dollars, code in single backquotes."""
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", write_as_rst, priority=400)  # before napoleon, at 500
    app.connect("autodoc-skip-member", skip_field)
    app.connect("source-read", add_names)
    app.connect("source-read", add_numbers)
    app.connect("build-finished", lead_to_first_page)


def add_names(app: Sphinx, page: str, source: list[str]) -> None:
    """Put a table of the names of a package below the title of its page of the reference."""
    found = re.match(r"# (primal_attention\.[\w.]+)\n", source[0])
    module = importlib.import_module(found[1]) if found else None
    if found and module and names_of(module):
        rows = [
            f"| {{py:obj}}`{name} <{found[1]}.{name}>` | {summary(module, name)} |"
            for name in names_of(module)
        ]
        table = "\n".join(["| name | |", "|---|---|", *rows])
        source[0] = source[0].replace(found[0], f"{found[0]}\n{table}\n", 1)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names: those of ``__all__``, or the functions and classes defined there."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]


def summary(module: ModuleType, name: str) -> str:
    """Return the first sentence of a name's documentation; nothing for plain values."""
    value = getattr(module, name)
    text = inspect.getdoc(value) or ""
    if text == inspect.getdoc(type(value)):
        return ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", r"\|")


def add_numbers(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the numbers of a table, from its files, below what its page says of them."""
    source[0] += filled_table((Path(app.srcdir) / page).parent)


def lead_to_first_page(app: Sphinx, exception: Exception | None) -> None:
    """The pages keep the paths of their sources; what a reader opens first is at the top."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (Path(app.outdir) / "index.html").write_text(page)


def skip_field(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out the fields of a NamedTuple: they are in its signature and have no text."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def write_as_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Translate the lines of a docstring, in place."""
    text = re.sub(f"{CODE}|{FORMULA}|{BAR}", rst_of, "\n".join(lines))
    lines[:] = text.split("\n")


def rst_of(found: re.Match[str]) -> str:
    """Write code, a formula or a bar (which is no substitution) in reStructuredText."""
    text, backquotes, formula = found[0], found[1], found[2]
    if formula is not None:
        return f":math:`{' '.join(formula.split())}`"
    if text == "|":
        return r"\|"
    return f"`{text}`" if backquotes == "`" and text.startswith("`") else text
