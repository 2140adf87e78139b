"""The parts of a clause that a whole check does not tell apart."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from primal_attention.testing.clauses.causal import causality, decoding
from primal_attention.testing.clauses.masks import cross_attention
from primal_attention.testing.report import Findings, NotApplicable, deviation, magnitude
from primal_attention.testing.subject import Subject

from .attentions import CausalLinear, Softmax, State

NAN = torch.tensor([math.nan])


def broken_observations(clause, attention, *, causal=False) -> set[str]:
    return {seen.what for seen in clause(Subject(attention, causal=causal, dim=None)).broken()}


def test_nan_never_equals_nan():
    assert deviation(NAN, NAN) == math.inf
    assert deviation(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf
    assert magnitude(NAN) == math.inf


def test_deviations_are_relative_above_one_and_absolute_below():
    assert deviation(torch.tensor([11.0]), torch.tensor([10.0])) == pytest.approx(0.1)
    assert deviation(torch.tensor([0.2]), torch.tensor([0.1])) == pytest.approx(0.1)


def test_tensors_of_other_shapes_are_not_compared():
    with pytest.raises(ValueError, match=r"\(1,\) against \(2,\)"):
        deviation(torch.zeros(1), torch.zeros(2))


def test_findings_name_the_worst_first():
    findings = Findings("all is well")
    findings.at_most("within", 1e-7, 1e-6)
    findings.at_most("slightly beyond", 1e-5, 1e-6)
    findings.zero("not zero", torch.tensor([0.5]))
    findings.at_least("absent", 0.0, 1e-4)
    assert [seen.what for seen in findings.broken()] == ["absent", "not zero", "slightly beyond"]
    assert findings.worst().what == "absent"


class PrefillIgnoresState(CausalLinear):
    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return super().prefill(x, None if x.shape[1] > 1 else state)


class SharesStateAcrossBatch(CausalLinear):
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        if x_t.shape[0] == 1:
            state = State(state.kv * 0, state.k)
        return super().step(x_t, state)


@pytest.mark.parametrize(
    ("attention", "observations"),
    [
        (CausalLinear, set()),
        (PrefillIgnoresState, {"prefill in chunks"}),
        (SharesStateAcrossBatch, {"one row of the state"}),
    ],
)
def test_decoding_tells_step_from_prefill(attention, observations):
    assert broken_observations(decoding, attention, causal=True) == observations


class BatchLast(CausalLinear):
    def init_state(self, batch_size: int) -> State:
        return State(*(value.movedim(0, -1) for value in super().init_state(batch_size)))


class PlainTuple(CausalLinear):
    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return tuple(super().init_state(batch_size))


class Counted(NamedTuple):
    count: int


class NumberInState(CausalLinear):
    def init_state(self, batch_size: int) -> Counted:
        return Counted(0)


class OutputOfSequence(CausalLinear):
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        y_t, state = super().step(x_t, state)
        return y_t[:, None], state


@pytest.mark.parametrize(
    ("attention", "error", "message"),
    [
        (BatchLast, ValueError, "kv must have the batch first"),
        (PlainTuple, TypeError, "must be a NamedTuple"),
        (NumberInState, TypeError, "count must be a Tensor, it is a int"),
        (OutputOfSequence, ValueError, r"y_t is \(3, 1, 6\)"),
    ],
)
def test_decoding_demands_the_form_of_the_state(attention, error, message):
    with pytest.raises(error, match=message):
        decoding(Subject(attention, causal=True, dim=None))


class CountsFutureMask(CausalLinear):
    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        share = real.to(x).mean(1, keepdim=True)
        return super().attend(x, real) * share


def test_causality_includes_the_mask_of_the_future():
    broken = broken_observations(causality, CountsFutureMask, causal=True)
    assert {what.split(" with")[0] for what in broken} == {
        "another mask of the future",
        "no future",
    }


class NoQueryMask(Softmax):
    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        if context is not None:
            token_mask = None
        return super().forward(x, context, token_mask=token_mask, context_mask=context_mask)


class SharedContext(Softmax):
    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        if context is not None:
            context = context.nan_to_num(0.0, 0.0, 0.0)
            context = context + 0.1 * context[:, :1].mean(0, keepdim=True)
        return super().forward(x, context, token_mask=token_mask, context_mask=context_mask)


@pytest.mark.parametrize(
    ("attention", "part"), [(NoQueryMask, "padded outputs"), (SharedContext, "alone")]
)
def test_cross_attention_covers_queries_and_batches(attention, part):
    assert any(part in what for what in broken_observations(cross_attention, attention))
    assert not broken_observations(cross_attention, Softmax)


def refusing(error):
    class Refusing(Softmax):
        def forward(self, x, context=None, **masks):
            if context is not None:
                raise error("takes no context")
            return super().forward(x, **masks)

    return Refusing


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_a_layer_may_refuse_a_context(error):
    with pytest.raises(NotApplicable, match="no context: takes no context"):
        cross_attention(Subject(refusing(error), causal=False, dim=None))


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_other_errors_are_not_taken_for_a_refusal(error):
    with pytest.raises(error, match="takes no context"):
        cross_attention(Subject(refusing(error), causal=False, dim=None))
