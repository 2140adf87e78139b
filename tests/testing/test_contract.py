"""The contract accepts correct modules, and names what is wrong with the others."""

import copy
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from primal_attention.testing import ContractError, Report, Status, check_attention

from . import attentions, broken
from .attentions import CausalLinear, Linear, Softmax, kept_loss

CORRECT = [
    attentions.Softmax,
    attentions.Linear,
    attentions.ZeroInitialised,
    attentions.PositionWise,
    attentions.OneLengthExport,
    attentions.CausalSoftmax,
    attentions.CausalWithoutState,
    attentions.CausalLinear,
    attentions.KeepsLoss,
]

BROKEN = [
    (broken.Constant, {"input dependence"}),
    (broken.WrongDtype, {"shapes and dtypes"}),
    (broken.KeysInNormaliser, {"padding invariance"}),
    (broken.CausalKeysInNormaliser, {"left padding"}),
    (broken.BiasAtPadding, {"padded positions"}),
    (broken.MultipliesByMask, {"poisoned padding"}),
    (broken.NormalisesOverBatch, {"batch independence"}),
    (broken.LeaksFuture, {"causality"}),
    (broken.DividesByLength, {"causality"}),
    (broken.StepForgets, {"decoding"}),
    (broken.NarrowState, {"decoding"}),
    (broken.RandomInEval, {"determinism"}),
    (broken.UnsavedBuffer, {"state dict"}),
    (broken.NaNInTraining, {"training mode"}),
    (broken.NormaliseAtZero, {"finite values", "gradient graphs"}),
    (broken.SensitiveToRounding, {"autocast"}),
    (broken.BreaksGraph, {"compile"}),
    (broken.BranchesOnData, {"compile", "export"}),
    (broken.ContextKeysInNormaliser, {"cross-attention"}),
    (broken.IgnoresContext, {"cross-attention"}),
    (broken.DetachedNormaliser, {"gradients", "gradient graphs"}),
    (broken.CountsPathsTwice, {"gradient graphs"}),
    (broken.InfiniteCurvature, {"gradient graphs"}),
    (broken.DropsTangent, {"forward mode"}),
    (broken.KeepsMask, {"threads"}),
    (broken.KeepsLossOfAll, {"threads"}),
    (broken.ReadsWeight, {"submodules"}),
    (broken.CallsForward, {"submodules"}),
    (broken.MergesWithoutGradients, {"submodules"}),
    # Mistakes that break several promises at once.
    (broken.CountsLengths, {"left padding", "mask holes", "poisoned padding"}),
    (
        broken.GradientAtPadding,
        {"padded positions", "mask holes", "poisoned padding", "gradients", "gradient graphs"},
    ),
    (
        broken.ValuesOnly,
        {"padding invariance", "padded positions", "mask holes", "poisoned padding"},
    ),
    (broken.SkipsMaskForBatchOfOne, {"padding invariance", "batch independence"}),
]


@cache
def report_of(attention: type[nn.Module]) -> Report:
    causal = issubclass(attention, attentions.CausalWithoutState | attentions.CausalSoftmax)
    objective = kept_loss if issubclass(attention, attentions.KeepsLoss) else None
    try:
        return check_attention(attention, causal=causal, objective=objective)
    except ContractError as error:
        assert not error.report.passed
        assert str(error) == str(error.report)
        return error.report


@cache
def without_graphs(attention: type[nn.Module]) -> type[nn.Module]:
    """The same module, checked in a tenth of the time."""
    exemptions = {"compile": "not asked here", "export": "not asked here"}
    return type(attention.__name__, (attention,), {"contract_exemptions": exemptions})


@pytest.mark.parametrize("attention", CORRECT)
def test_correct_modules_pass(attention):
    report = report_of(attention)
    assert report.passed, str(report)


@pytest.mark.parametrize(("attention", "clauses"), BROKEN)
def test_broken_modules_fail_their_clause_and_no_other(attention, clauses):
    in_a_graph = clauses & {"compile", "export"}
    report = report_of(attention if in_a_graph else without_graphs(attention))
    assert set(report.failed) == clauses, str(report)


def test_every_clause_has_a_module_that_breaks_it():
    names = {result.name for result in report_of(Linear).results}
    assert names == set().union(*(clauses for _, clauses in BROKEN))


def test_a_module_is_checked_as_a_copy_and_left_alone():
    layer = Softmax().train()
    layer(torch.randn(2, 3, 6)).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with torch.no_grad():
        assert check_attention(layer).passed
    assert torch.equal(torch.rand(3), expected)
    assert layer.training
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(torch.equal(gradients[name], p.grad) for name, p in layer.named_parameters())


def test_the_default_dtype_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        assert check_attention(without_graphs(CausalLinear), causal=True).passed
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_report_can_be_repeated():
    assert str(check_attention(Linear)) == str(report_of(Linear))


def test_unsaved_buffers_need_a_factory():
    report = check_attention(without_graphs(broken.UnsavedBuffer)())
    assert "pass a factory" in report["state dict"].detail


def test_the_report_is_a_table():
    lines = str(report_of(CausalLinear)).splitlines()
    assert lines[0] == "Attention contract of CausalLinear: 22 passed, 1 not applicable"
    column = lines[2].index("status")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[2:])


def test_the_report_names_the_broken_clause_and_the_number():
    report = report_of(without_graphs(broken.KeysInNormaliser))
    result = report["padding invariance"]
    assert result.status is Status.FAILED
    assert result.measured > 1e-2 > result.bound
    assert "padding invariance  failed" in str(report)
    with pytest.raises(KeyError, match="no clause is called 'padding'"):
        report["padding"]


def test_mixing_is_reported_and_not_demanded():
    assert "tokens influence each other" in report_of(Linear)["input dependence"].detail
    detail = report_of(attentions.PositionWise)["input dependence"].detail
    assert "tokens do not influence each other" in detail


def test_modules_without_state_or_context_say_so():
    report = report_of(attentions.CausalWithoutState)
    assert report["decoding"].status is Status.NOT_APPLICABLE
    assert report["decoding"].detail == "no decode state"
    assert "unexpected keyword argument 'context'" in report["cross-attention"].detail


def test_nan_in_the_future_is_reported_and_not_demanded():
    assert "stays there" in report_of(CausalLinear)["causality"].detail
    report = report_of(attentions.CausalSoftmax)
    assert "reaches the past" in report["causality"].detail


def test_a_module_that_exports_one_length_only_passes():
    detail = report_of(attentions.OneLengthExport)["export"].detail
    assert "at its own length" in detail


class Crashes(nn.Module):
    dim = 6

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        raise RuntimeError("the projection is missing\nand more")


class ReturnsTuple(Linear):
    def forward(self, x, *, token_mask=None):
        return super().forward(x, token_mask=token_mask), None


@pytest.mark.parametrize(
    ("attention", "text"),
    [
        (Crashes, "RuntimeError: the projection is missing"),
        (ReturnsTuple, "TypeError: forward must return a Tensor, it returned tuple"),
    ],
)
def test_a_crash_is_a_failed_clause_with_its_text(attention, text):
    report = report_of(attention)
    assert report["shapes and dtypes"].detail == text
    assert report["shapes and dtypes"].measured is None


def test_an_exemption_shows_its_reason():
    layer = without_graphs(broken.KeysInNormaliser)()
    layer.contract_exemptions |= {"padding invariance": "the paper leaves the keys unmasked"}
    report = check_attention(layer)
    assert report["padding invariance"].status is Status.EXEMPT
    assert "the paper leaves the keys unmasked" in str(report)
    assert "3 exempt" in str(report)


@pytest.mark.parametrize(
    ("exemptions", "message"),
    [({"padding": "why"}, "'padding', which does not exist"), ({"export": " "}, "state a reason")],
)
def test_wrong_exemptions_are_refused(exemptions, message):
    layer = Linear()
    layer.contract_exemptions = exemptions
    with pytest.raises(ValueError, match=message):
        check_attention(layer)


class Uncopyable(Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("holds a graph")


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        (nn.Identity(), ValueError, "pass dim="),
        (3, TypeError, "must be an nn.Module or a function"),
        (lambda: 3, TypeError, "must return an nn.Module, it returned 3"),
        (Uncopyable(), ValueError, "holds a graph.*pass a function that builds it"),
    ],
)
def test_wrong_arguments_are_refused(argument, error, message):
    with pytest.raises(error, match=message):
        check_attention(argument)


DOCUMENT = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()


def test_the_document_names_every_clause():
    rows = re.findall(r"^\| ([^|]+) \|", DOCUMENT, flags=re.MULTILINE)
    assert rows[0] == "clause"
    assert rows[1:] == [result.name for result in report_of(Linear).results]


def test_the_example_of_the_document_runs_and_fails_as_it_says(capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    exec(example, {"__name__": "example"})
    printed = capsys.readouterr().out
    shown = re.findall(r"^    (\S.*?)  +failed ", DOCUMENT, flags=re.MULTILINE)
    assert shown == re.findall(r"^(\S.*?)  +failed ", printed, flags=re.MULTILINE) != []
