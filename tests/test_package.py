"""The package as its users get it: names, version, wheel, and what an import costs."""

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import primal_attention

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "primal_attention": [
        "ATTENTIONS",
        "KernelSVD",
        "PrimalAttention",
        "PrimalMultiheadAttention",
        "build_attention",
        "ksvd_loss",
        "patch",
        "plan",
        "record_ksvd",
        "unpatch",
    ],
    "primal_attention.analysis": [
        "Duality",
        "Spectrum",
        "Suggestion",
        "attention_matrices",
        "duality",
        "figure1",
        "plot_spectra",
        "spectrum",
        "suggest_directions",
    ],
    "primal_attention.patching": [
        "Affine",
        "DistillReport",
        "Host",
        "PatchedAttention",
        "Plan",
        "PrimalMultiheadAttention",
        "Projections",
        "distill",
        "load_patched",
        "lora_config",
        "patch",
        "plan",
        "register_host",
        "save_patched",
        "trainer_callback",
        "unpatch",
    ],
    "primal_attention.attention": [
        "ATTENTIONS",
        "PrimalAttention",
        "build_attention",
        "card_of",
        "options_of",
    ],
    "primal_attention.theory": [
        "Cosine",
        "Exponential",
        "KERNELS",
        "Kernel",
        "KernelSVD",
        "NotFittedError",
        "Polynomial",
        "RBF",
        "ksvd",
        "svr",
        "weighted_ksvd",
    ],
    "primal_attention.models": [
        "Embedding",
        "Encoder",
        "EncoderBlock",
        "LanguageModel",
        "MODELS",
        "PrimalFormerConfig",
        "PrimalFormerForCausalLM",
        "PrimalFormerForImageClassification",
        "PrimalFormerForMaskedLM",
        "PrimalFormerForSequenceClassification",
        "PrimalFormerForTokenClassification",
        "PrimalFormerModel",
        "SequenceClassifier",
        "Tower",
        "TwoTowerClassifier",
        "build_attentions",
    ],
    "primal_attention.ops.causal": [
        "running_mean",
        "scan",
        "token_counts",
    ],
    "primal_attention.ops.layer": ["LayerInputs", "LayerResult", "fused_layer", "layer"],
    "primal_attention.ops.primal": [
        "Attended",
        "Sides",
        "both_sides",
        "collapsed_attention",
        "features",
        "gram",
        "moment",
        "primal_scores",
        "weights_given_x",
        "with_features",
        "zeroed",
    ],
    "primal_attention.testing": [
        "ClauseResult",
        "ContractError",
        "Report",
        "Status",
        "check_attention",
    ],
    "primal_attention.timeseries": [
        "PresetSelection",
        "PrimalFormerClassifier",
        "PrimalFormerRegressor",
        "select_preset",
    ],
    "primal_attention.training": [
        "DOMAINS",
        "Domain",
        "Outcome",
        "Recipe",
        "Watcher",
        "build_model",
        "find_domain",
        "find_recipe",
        "finish",
        "launch",
        "progress_bar",
        "read_outcome",
        "task_of",
        "train",
        "train_in",
        "trained_model",
    ],
}

IMPORT_ALL = """
import importlib, pkgutil, sys
{setup}
import primal_attention
names = [m.name for m in pkgutil.walk_packages(primal_attention.__path__, "primal_attention.")]
names = [name for name in names if not name.split(".")[-1].startswith("triton")]  # fused ops
names = [name for name in names if ".cli." not in name]  # imported when `primal` runs
names.remove("primal_attention.models.hugging_face")  # imported when one of their names is needed
names.remove("primal_attention.patching.hosts.transformers_cache")
for name in names:
    importlib.import_module(name)
assert len(names) > 20, names
"""


def run(code, *, cwd):
    """A fresh interpreter that sees neither the working directory nor PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def assert_succeeded(result):
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == PUBLIC[module]
    for name in imported.__all__:
        assert getattr(imported, name) is not None


def test_the_version_is_one():
    version = primal_attention.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", version), version


def test_the_dependencies_are_three():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in project["dependencies"]}
    assert names == {"torch", "numpy", "einops"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert_succeeded(built)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_is_for_every_platform_and_has_the_version(wheel):
    version = primal_attention.__version__
    assert wheel.name == f"primal_attention-{version}-py3-none-any.whl"


def test_what_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
    assert "primal_attention/py.typed" in names
    assert [name for name in names if Path(name).name == "LICENSE"]
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"primal_attention"}
    assert not [name for name in names if re.search(r"(^|/)(tests?/|test_|conftest)", name)]
    assert not [name for name in names if name.endswith((".pyc", ".csv", ".png", ".pt"))]
    for source in (ROOT / "primal_attention").rglob("*"):
        if source.suffix in (".py", ".html"):
            assert str(source.relative_to(ROOT)) in names, "a source is missing"
    assert "License-Expression: MIT" in metadata
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, flags=re.MULTILINE)
    assert sorted(required) == ["einops", "numpy", "torch"]


def test_the_wheel_works_by_itself(installed, tmp_path):
    code = IMPORT_ALL.format(setup=f"sys.path.insert(0, {str(installed)!r})")
    code += f"""
from pathlib import Path
assert Path(primal_attention.__file__).is_relative_to({str(installed)!r}), primal_attention.__file__
import torch
layer = primal_attention.PrimalAttention(12, 2, 3)
y = layer(torch.randn(2, 5, 12))
assert y.shape == (2, 5, 12)
(y.sum() + primal_attention.ksvd_loss(layer)).backward()
"""
    assert_succeeded(run(code, cwd=tmp_path))


def test_no_module_of_the_package_imports_an_optional_library(tmp_path):
    code = IMPORT_ALL.format(setup=f"sys.path.insert(0, {str(ROOT)!r})")
    code += """
heavy = {"matplotlib", "sklearn", "scipy", "lightning", "transformers", "timm", "pandas", "pytest"}
heavy |= {"aeon", "numba", "lightning_fabric", "pytorch_lightning", "optuna", "typer", "rich"}
heavy |= {"safetensors"}
found = sorted(heavy & {name.split(".")[0] for name in sys.modules})
assert not found, found
"""
    assert_succeeded(run(code, cwd=tmp_path))


def test_an_import_has_no_side_effects(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.manual_seed(7)
before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
import primal_attention, primal_attention.testing
assert torch.equal(torch.get_rng_state(), before[0])
assert (torch.get_default_dtype(), torch.get_num_threads()) == before[1:]
assert torch.is_grad_enabled()
"""
    result = run(code, cwd=tmp_path)
    assert_succeeded(result)
    assert result.stdout == result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_an_import_brings_in_neither_the_compiler_nor_triton(tmp_path):
    code = "import sys, primal_attention; assert not {'torch._dynamo', 'triton'} & set(sys.modules)"
    assert_succeeded(run(code, cwd=tmp_path))
