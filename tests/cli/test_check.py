"""`primal check`: the registry, anyone's modules, and what it says of mistakes."""

import builtins
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from typer.testing import CliRunner

from primal_attention import cli
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.cli import check as check_module
from primal_attention.testing.adapters import adapt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nystrom_attention import NystromAttention

SKIPPED = {"compile": "not asked here", "export": "not asked here"}


class Quick(SoftmaxAttention):
    """Checked in a second; softmax attention in all other things."""

    contract_exemptions = SKIPPED


class KeysUnmasked(Quick):
    """Padded keys are attended to."""

    def attend(self, q, k, v, mask, source_mask):
        return super().attend(q, k, v, mask, None)


class QuickMultihead(nn.MultiheadAttention):
    contract_exemptions = SKIPPED


class QuickNystrom(NystromAttention):
    contract_exemptions = SKIPPED

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, dim // heads, heads, num_landmarks=8)


def needs_a_config(config):
    return Quick(config.dim, config.heads)


READY = Quick(8, 2)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Make this file a module that `primal check` can import by name."""
    monkeypatch.setitem(sys.modules, "mechanisms_of_mine", sys.modules[__name__])
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str):
    return CliRunner().invoke(cli.app(), ["check", *arguments])


def failed(output: str) -> set[str]:
    """The clauses that the printed reports call failed."""
    return {line.split("  ")[0] for line in output.splitlines() if "  failed  " in line}


def test_the_registry_is_checked_in_all_its_forms(monkeypatch):
    monkeypatch.setattr(check_module, "ATTENTIONS", {"softmax": Quick})
    monkeypatch.setattr(
        check_module, "build_attention", lambda name, *args, **kw: Quick(*args, **kw)
    )
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (alone,) = [line.split() for line in lines if line.startswith("softmax  ")]
    (causal,) = [line.split() for line in lines if line.startswith("softmax causal")]
    assert len(alone[1:]) == len(causal[2:]) == 23
    assert (alone[1:].count("-"), causal[2:].count("-")) == (2, 1)
    assert alone.count("e") == causal.count("e") == 2
    assert "exempt: softmax causal: compile: not asked here" in lines
    assert " 3 padding invariance" in result.stdout


def test_a_broken_mechanism_of_the_registry_gives_exit_code_1(monkeypatch):
    monkeypatch.setattr(check_module, "ATTENTIONS", {"mine": KeysUnmasked})
    monkeypatch.setattr(
        check_module, "build_attention", lambda name, *args, **kw: KeysUnmasked(*args, **kw)
    )
    result = run("--no-causal")
    assert result.exit_code == 1
    assert "failed: mine: padding invariance: broken by" in result.stdout
    assert "mine causal" not in result.stdout


def test_one_name_gives_the_whole_report():
    result = run("softmax", "--causal", "--dim", "8", "--heads", "2")
    assert result.exit_code == 0, result.output
    assert "Attention contract of softmax causal: 22 passed, 1 not applicable" in result.stdout
    assert "decoding            passed" in result.stdout


def test_a_failing_module_gives_exit_code_1_and_names_the_clause():
    result = run("mechanisms_of_mine:KeysUnmasked", "--dim", "8")
    assert result.exit_code == 1
    assert "Attention contract of mechanisms_of_mine:KeysUnmasked" in result.stdout
    assert "padding invariance" in failed(result.stdout)


def test_a_module_that_is_built_already():
    result = run("mechanisms_of_mine:READY")
    assert result.exit_code == 0, result.output
    assert "pass a factory" in result.stdout


def test_multihead_attention_is_recognised():
    """It masks keys, and neither what stands at padding nor NaN there."""
    result = run("mechanisms_of_mine:QuickMultihead", "--dim", "32", "--heads", "4")
    assert result.exit_code == 1
    assert failed(result.stdout) == {
        *("padded positions", "poisoned padding", "cross-attention", "submodules")
    }
    causal = run("mechanisms_of_mine:QuickMultihead", "--causal")
    assert "causality           passed" in causal.stdout
    assert "causality" not in failed(causal.stdout)


def test_a_layer_of_lucidrains():
    """What its own padding to whole segments, and its norm over the batch, do to the contract."""
    result = run("mechanisms_of_mine:QuickNystrom", "--adapter", "lucidrains", "--dim", "16")
    assert result.exit_code == 1
    broken = failed(result.stdout)
    assert {"padding invariance", "padded positions", "batch independence"} <= broken
    assert not broken & {"input dependence", "determinism", "state dict", "training mode"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sofmax"], "no attention is called 'sofmax'; did you mean softmax"),
        (["torch.nn:MultiHeadAttention"], "did you mean MultiheadAttention"),
        (["no_such_module:Layer"], "'no_such_module' cannot be imported"),
        (["mechanisms_of_mine:needs_a_config"], "give a function without arguments"),
        (["mechanisms_of_mine:SKIPPED"], "is a dict, neither a module nor builds one"),
        (["mechanisms_of_mine:Quick", "--adapter", "jax"], "adapter must be one of mha, hf"),
        (["softmax", "--dim", "9"], "dim must be a multiple of num_heads"),
    ],
)
def test_mistakes_are_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_mechanism_without_a_causal_form_says_so(monkeypatch):
    monkeypatch.setattr(Quick, "mechanism", Quick.mechanism._replace(causal=False))
    monkeypatch.setattr(check_module, "ATTENTIONS", {"mine": Quick})
    result = run("mine", "--causal")
    assert result.exit_code == 2
    assert "mine has no causal form" in result.stderr


def test_without_typer_it_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match=r"pip install 'primal-attention\[cli\]'"):
        cli.main()


class Recorder(nn.Module):
    """Returns its input, and keeps the mask it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, x, mask=None, attention_mask=None):
        self.seen = mask if attention_mask is None else attention_mask
        return (x, None) if attention_mask is not None else x


MASK = torch.tensor([[True, True, False]])


@pytest.mark.parametrize(
    ("adapter", "want"),
    [
        ("lucidrains", MASK),
        ("hf", torch.tensor([[1, 1, 0]])),
        ("hf-additive", torch.tensor([[[[0.0, 0.0, torch.finfo(torch.float32).min]]]])),
    ],
)
def test_adapters_translate_the_mask(adapter, want):
    recorder = Recorder()
    x = torch.randn(1, 3, 4)
    adapted = adapt(recorder, adapter)
    assert adapted(x, token_mask=MASK) is x
    assert torch.equal(recorder.seen, want)
    assert recorder.seen.dtype == want.dtype
    assert adapted(x) is x


def test_multihead_attention_with_the_batch_second():
    torch.manual_seed(0)
    first = nn.MultiheadAttention(8, 2, batch_first=True)
    second = nn.MultiheadAttention(8, 2)
    second.load_state_dict(first.state_dict())
    x, context = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    alone = first(x, context, context, need_weights=False)[0]
    assert_close(adapt(second)(x, token_mask=MASK), adapt(first)(x, token_mask=MASK))
    assert_close(adapt(second)(x, context), alone)


def test_adapters_keep_exemptions_and_leave_others_alone():
    plain = nn.Identity()
    assert adapt(plain) is plain
    assert adapt(QuickMultihead(8, 2)).contract_exemptions == SKIPPED
