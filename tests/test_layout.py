"""Data flows down, imports point up: each part of the package knows only those above it."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "primal_attention"
ROOT = Path(__file__).parents[1] / PACKAGE
PARTS = [
    "foreign_files",
    "atomic_files",
    "array_files",
    "state_dicts",
    "extras",
    "theory",
    "precision",
    "calibration",
    "feature_maps",
    "ops",
    "attention",
    "objectives",
    "uncertainty",
    "patching",
    "models",  # some are hosts of others with attention patched
    "pretrained",
    "distributed",
    "tasks",
    "training",
    "timeseries",
    "analysis",
    "testing",
    "benchmarking",
    "cli",
]
ALONE = {"testing"}  # it tests any module, so it knows none of ours
DEPENDENCIES = {"torch", "numpy", "einops"}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(module: str) -> str | None:
    """The part a module of the package belongs to; None for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def module_name(path: Path, root: Path = ROOT) -> str:
    names = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """The full name of everything that is imported, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                names = module.split(".")
                names = names[: len(names) - node.level + (1 if is_package else 0)]
                base = ".".join([*names, base] if base else names)
            # `from package import part` imports the part as much as `import package.part` does
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.AST) -> ast.Module:
    """The same tree without what does not run on import: functions, and imports for types."""

    class WithoutFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if for_types else self.generic_visit(node)

    return WithoutFunctions().visit(tree)


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports of parts that do not stand above the module's own."""
    own = part_of(module)
    wrong = []
    for name in imports(ast.parse(source), module, is_package=is_package):
        if name.split(".")[0] != PACKAGE:
            continue
        other = part_of(name)
        if other == own or own is None:
            continue
        if other not in PARTS or own in ALONE or PARTS.index(other) > PARTS.index(own):
            wrong.append(f"{module} imports {name}")
    return wrong


ON_DEMAND = (  # imported when one of their names is needed
    f"{PACKAGE}.models.hugging_face",
    f"{PACKAGE}.patching.hosts.transformers_cache",
)


def foreign_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports at import time of anything but the dependencies and the standard library."""
    tree = at_import_time(ast.parse(source))
    known = DEPENDENCIES | {PACKAGE} | set(sys.stdlib_module_names)
    if is_fused(module):
        known |= {"triton"}
    if module.startswith(f"{PACKAGE}.cli."):  # imported when `primal` runs
        known |= {"typer", "rich"}
    if module in ON_DEMAND:
        known |= {"transformers"}
    return [
        f"{module} imports {name}"
        for name in imports(tree, module, is_package=is_package)
        if name.split(".")[0] not in known
    ]


def is_fused(module: str) -> bool:
    """Whether a module holds fused ops, which others import when they first run on a GPU."""
    names = module.split(".")
    return f"{PACKAGE}.ops.triton" in module or names[-1].startswith("fused")


def shared_class_names(sources: dict[Path, str]) -> set[str]:
    """Names of public classes of the package that more than one file defines."""
    owners: dict[str, set[Path]] = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, set()).add(file)
    return {name for name, files in owners.items() if len(files) > 1}


ABSOLUTE_PATH = re.compile(r"(?<![\w:/.)\]}<*])/[A-Za-z_][\w.-]*/[\w.-]+|\b[A-Z]:\\\w+")


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(ROOT)))
def path(request) -> Path:
    return request.param


def test_there_is_something_to_check():
    assert len(FILES) > 20


def test_imports_point_up(path):
    is_package = path.name == "__init__.py"
    assert wrong_arrows(path.read_text(), module_name(path), is_package=is_package) == []


def test_only_the_dependencies_are_imported(path):
    is_package = path.name == "__init__.py"
    assert foreign_imports(path.read_text(), module_name(path), is_package=is_package) == []


def test_fused_ops_are_imported_inside_functions_only(path):
    if is_fused(module_name(path)):
        return
    tree = at_import_time(ast.parse(path.read_text()))
    names = imports(tree, module_name(path), is_package=path.name == "__init__.py")
    ours = [name for name in names if name.startswith(PACKAGE)]
    modules = {module_name(file) for file in FILES}
    assert not [name for name in ours if name in modules and is_fused(name)]


def test_every_part_has_a_place_in_the_order():
    parts = {part_of(module_name(file)) for file in FILES} - {None}
    assert parts <= set(PARTS)


def test_files_are_named_after_what_they_hold(path):
    assert path.stem not in {"utils", "util", "misc", "helpers", "common"}
    assert path.name == path.name.lower()


def test_no_two_public_classes_have_one_name():
    assert shared_class_names({file: file.read_text() for file in FILES}) == set()


def test_no_path_of_some_machine():
    for file in [*FILES, *ROOT.rglob("*.md")]:
        found = ABSOLUTE_PATH.search(file.read_text())
        assert found is None, f"{file.relative_to(ROOT)}: {found.group()}"


def test_no_module_stands_beside_the_parts():
    """One file a part or one folder a part, never both."""
    files = {file.stem for file in ROOT.glob("*.py")} - {"__init__"}
    folders = {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()}
    assert not files & folders


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.scan", "from primal_attention.attention import PrimalAttention"),
        ("ops.scan", "import primal_attention.objectives"),
        ("ops.scan", "from primal_attention import objectives"),
        ("ops.scan", "from ..attention import masks"),
        ("theory.ksvd", "from primal_attention.precision import exact"),
        ("attention.primal", "def f():\n    from primal_attention.objectives import ksvd_loss"),
        ("testing.contract", "from primal_attention.ops.scan import scan"),
        ("ops.scan", "from primal_attention.unheard_of import thing"),
        ("ops.scan", "from primal_attention import ksvd_loss"),
    ],
)
def test_wrong_arrows_are_seen(module, source):
    assert wrong_arrows(source, f"{PACKAGE}.{module}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attention.primal", "from primal_attention.ops.scan import scan"),
        ("attention.primal", "from . import causal\nfrom ..ops import scan"),
        ("objectives", "from primal_attention.attention.base.validation import check_choice"),
        ("testing.contract", "import torch\nfrom primal_attention.testing.report import Report"),
        ("cli", "from primal_attention.testing import check_attention"),
    ],
)
def test_right_arrows_are_not(module, source):
    assert wrong_arrows(source, f"{PACKAGE}.{module}") == []


def test_shared_class_names_are_seen():
    files = {Path("a.py"): "class Run: ...\nclass _Own: ...", Path("b.py"): "class Run: ..."}
    assert shared_class_names(files) == {"Run"}
    assert shared_class_names({**files, Path("c.py"): "class _Own: ..."}) == {"Run"}


def test_foreign_imports_and_paths_are_seen():
    assert foreign_imports("import scipy", PACKAGE)
    assert foreign_imports("try:\n    import matplotlib.pyplot as plt\nfinally:\n    pass", PACKAGE)
    assert foreign_imports("class A:\n    from sklearn import svm", PACKAGE)
    assert not foreign_imports("def f():\n    import scipy", PACKAGE)
    assert foreign_imports("import triton", f"{PACKAGE}.ops.causal.eager")
    assert not foreign_imports("import triton", f"{PACKAGE}.ops.causal.fused_scan")
    assert not foreign_imports("import triton", f"{PACKAGE}.ops.triton.tiles")
    assert not foreign_imports("import torch.nn as nn\nfrom pathlib import Path", PACKAGE)
    for text in ('"/home/me/data"', "see /mnt/disk/x.csv", r"C:\data"):
        assert ABSOLUTE_PATH.search(text)
    for text in ("a/b/c", "https://a.org/b/c", "./a/b", "1 / n / m", "e/r, q/k", "W_e/W_r/x"):
        assert not ABSOLUTE_PATH.search(text)
