"""No pickle is read anywhere in the package: whoever writes one chooses what is called."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "primal_attention"
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS = {  # functions that unpickle, or may, by the module they are called on
    "torch": {"load"},
    "torch.jit": {"load"},
    "torch.serialization": {"load"},
    "torch.package": {"PackageImporter"},
    "numpy": {"load"},
    "pandas": {"read_pickle"},
}
SHORT = {"np": "numpy", "pd": "pandas"}


def unpicklers(source: str) -> Iterator[str]:
    """All that could unpickle, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                called = {each.name for each in names} & LOADERS.get(module, set())
                if module.split(".")[0] in MODULES or called:
                    yield module
            case ast.Attribute(value, name):
                module = SHORT.get(ast.unparse(value), ast.unparse(value))
                if name in LOADERS.get(module, set()):
                    yield f"{module}.{name}"
            case ast.keyword("allow_pickle", ast.Constant(True)) | ast.keyword("weights_only"):
                yield str(node.arg)
            case ast.Call(args=[ast.Constant(str(name)), *_]) if name.split(".")[0] in MODULES:
                yield name  # as by importlib.import_module


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_nothing_unpickles(path):
    assert list(unpicklers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "def f():\n    from joblib import load",
        "from dill.loading import x",
        "importlib.import_module('shelve')",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "read = torch.load",
        "from torch import load",
        "np.load(path, allow_pickle=False)",
        "reader(path, allow_pickle=True)",
        "torch.jit.load(path)",
        "pd.read_pickle(path)",
    ],
)
def test_what_unpickles_is_seen(source):
    assert list(unpicklers(source))
