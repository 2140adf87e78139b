"""The KSVD objective and the trace as ops: their formulas, gradients and registration."""

from itertools import product

import pytest
import torch

from primal_attention.ops.ksvd import ksvd_objective, mean_over_sequences, reference, trace

from .formulas import assert_close, assert_same, gradients, randn
from .ksvd_inputs import CASES, B, H, P, S, count_tensors, make_inputs

cases = pytest.mark.parametrize("case", CASES)
OPTIONS = [
    dict(zip(("averaged", "lambda_squared", "squared"), values, strict=True))
    for values in product((False, True), repeat=3)
]
options = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: str(tuple(option.values())))
COUNTS = count_tensors()


def formula(gram_q, gram_k, w_e, w_r, lambda_diag, own_trace, *, averaged, lambda_squared, squared):
    """Direction by direction."""
    taken = []
    for b, (n, t) in enumerate(zip(*(count.tolist() for count in COUNTS), strict=True)):
        if n == 0 or t == 0:
            continue
        j = 0.0
        for h in range(H):
            e, r = (w[h] if w.ndim == 3 else w[b, h] for w in (w_e, w_r))
            for s in range(S):
                size = lambda_diag[h, s] ** (2 if lambda_squared else 1) / 2
                j = j + size * e[:, s] @ gram_q[b, h] @ e[:, s] / (n if averaged else 1)
                j = j + size * r[:, s] @ gram_k[b, h] @ r[:, s] / (t if averaged else 1)
            j = j - (torch.trace(e.T @ r) if own_trace is None else own_trace[h])
        taken.append(j / H)
    values = torch.stack(taken)
    return (values.square() if squared else values).mean()


def call(op, **option):
    return lambda *x: (op(*x, *COUNTS, **option)[None],)


@options
@cases
def test_the_reference_is_the_formula(case, option):
    inputs = make_inputs(case)
    run = call(reference.ksvd_objective, **option)
    assert_same(run, lambda *x: (formula(*x, **option)[None],), inputs)


@options
@cases
def test_the_op_equals_the_reference(case, option):
    inputs = make_inputs(case)
    assert_same(
        call(ksvd_objective, **option), call(reference.ksvd_objective, **option), inputs, 1e-12
    )


@cases
def test_one_sequence(case):
    counts = [count[:1] for count in COUNTS]
    inputs = [x[:1] if x is not None and x.ndim == 4 else x for x in make_inputs(case)]
    assert_same(
        lambda *x: (ksvd_objective(*x, *counts)[None],),
        lambda *x: (reference.ksvd_objective(*x, *counts)[None],),
        inputs,
        1e-12,
    )


@pytest.mark.parametrize("op", [ksvd_objective, reference.ksvd_objective])
@cases
def test_sequences_without_tokens_add_nothing(case, op):
    """Not even the trace of their weights."""
    counts = [torch.zeros_like(COUNTS[0]), COUNTS[1]]
    values, grads = gradients(lambda *x: (op(*x, *counts)[None],), make_inputs(case))
    assert values[0] == 0
    for grad in grads:
        assert not grad.any()


@pytest.mark.parametrize("op", [ksvd_objective, reference.ksvd_objective])
def test_what_stands_in_sequences_without_tokens_is_not_in_the_value(op):
    gram_q, *others = make_inputs("shared, own")
    poisoned = gram_q.clone()
    poisoned[1] = float("nan")
    assert COUNTS[1][1] == 0
    assert torch.equal(op(poisoned, *others, *COUNTS), op(gram_q, *others, *COUNTS))


def test_whole_numbers_of_tokens():
    inputs = make_inputs("shared, given")
    counted = ksvd_objective(*inputs, *(count.long() for count in COUNTS))
    assert torch.equal(counted, ksvd_objective(*inputs, *COUNTS))


@cases
def test_float32_is_near_float64(case):
    inputs = make_inputs(case)
    expected = gradients(call(ksvd_objective), inputs)
    single = [None if x is None else x.float() for x in inputs]
    for got, want in zip(gradients(call(ksvd_objective), single), expected, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == torch.float32
            assert (one - other).norm() <= 2e-6 * other.norm()


@cases
def test_gradients_of_gradients(case):
    given = [x.requires_grad_() for x in make_inputs(case) if x is not None]
    last = [] if len(given) == 6 else [None]

    def run(*x):
        return ksvd_objective(*x, *last, *COUNTS)

    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("frozen", range(6))
def test_inputs_that_need_no_gradient(frozen):
    """Each alone, with and without a graph of the gradients."""
    inputs = [x.requires_grad_(i != frozen) for i, x in enumerate(make_inputs("batched, given"))]
    wanted = [x for x in inputs if x.requires_grad]
    expected = torch.autograd.grad(reference.ksvd_objective(*inputs, *COUNTS), wanted)
    for create_graph in (False, True):
        value = ksvd_objective(*inputs, *COUNTS)
        grads = torch.autograd.grad(value, wanted, create_graph=create_graph)
        for got, want in zip(grads, expected, strict=True):
            assert_close(got, want, 1e-12)


def opcheck(name, arguments):
    op = getattr(torch.ops.primal_attention, name).default
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@cases
def test_opcheck(case):
    given = make_inputs(case)
    inputs = [None if x is None else x.detach().requires_grad_() for x in given]
    opcheck("ksvd_forward", (*inputs, *COUNTS, True, True, True))
    kept = randn(B), randn(2, B, H, S, seed=1)
    opcheck("ksvd_backward", (*given, *COUNTS, *kept, True, True, randn(1)[0]))


def test_mean_over_sequences():
    values = torch.tensor([2.0, float("nan"), 4.0, float("inf")])
    counts = torch.tensor([3, 0, 1, 5]), torch.tensor([1, 2, 7, 0])
    assert mean_over_sequences(values, *counts) == 3
    assert mean_over_sequences(values, *(0 * count for count in counts)) == 0


def parameters(*, dtype=torch.float64):
    return [randn(H, P, S, seed=i, dtype=dtype).requires_grad_() for i in range(2)]


def op_trace(*x):
    return torch.ops.primal_attention.trace_forward(*x)


traces = pytest.mark.parametrize("op", [trace, op_trace])


@traces
def test_trace(op):
    def traced(w_e, w_r):
        return (torch.stack([torch.trace(e.T @ r) for e, r in zip(w_e, w_r, strict=True)]),)

    assert_same(lambda *x: (op(*x),), traced, parameters(), 1e-12)
    assert torch.autograd.gradgradcheck(op, parameters())


@traces
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trace_of_half_precision_is_summed_in_float32(op, dtype):
    given = parameters(dtype=dtype)
    wide = [x.detach().double() for x in given]
    value = op(*given)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), op(*wide), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(value.sum(), given)
    for grad, other in zip(grads, reversed(given), strict=True):
        assert torch.equal(grad, other)


def test_opcheck_of_trace():
    given = parameters()
    opcheck("trace_forward", tuple(given))
    opcheck("trace_backward", (*(x.detach() for x in given), randn(H)))
