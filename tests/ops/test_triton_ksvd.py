import pytest
import torch

from primal_attention.ops.ksvd import composed
from primal_attention.ops.ksvd import trace as plain_trace

from .formulas import randn
from .fused import (
    DEVICES,
    TOLERANCES,
    assert_bits,
    assert_near,
    in_double,
    poisoned_memory,
)
from .ksvd_inputs import CASES, count_tensors, make_inputs
from .padding import assert_laid_out

fused = pytest.importorskip("primal_attention.ops.ksvd.triton", exc_type=ImportError)
from primal_attention.ops.ksvd import triton_trace as fused_trace  # noqa: E402 - needs triton

__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over directions.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
cases = pytest.mark.parametrize("case", CASES)
D_MEAN = torch.tensor(-1.7)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(case, device, **sizes):
    """In float32, with the numbers of tokens."""
    given = make_inputs(case, **sizes)
    both = [*given, *count_tensors(len(given[0]))]
    return [None if x is None else x.float().to(device) for x in both]


def run(arguments, averaged=True, lambda_squared=True, squared=True):
    """All that the fused ops give."""
    options = averaged, lambda_squared
    values = fused.forward(*arguments, *options, squared)
    d_mean = D_MEAN.to(arguments[0].device)
    return [*values, *fused.backward(*arguments, *values[1:], *options, d_mean)]


def expected_of(arguments, averaged=True, lambda_squared=True, squared=True):
    """The same by the composed form in float64."""
    options = averaged, lambda_squared

    def both(*tensors):
        values = composed.forward_composed(*tensors, *options, squared)
        d_mean = D_MEAN.to(tensors[0])
        return *values, *composed.backward_composed(*tensors, *values[1:], *options, d_mean)

    return in_double(both, arguments)


def check(arguments, *options):
    assert_near(
        run(arguments, *options), expected_of(arguments, *options), TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("batched, given", (True, True, True)),
        ("batched, given", (False, False, False)),
        ("batched, own", (True, False, True)),
        ("batched, own", (False, True, True)),
        ("shared, given", (True, True, False)),
        ("shared, own", (False, False, True)),
    ],
)
def test_values_and_gradients(device, case, options):
    check(inputs(case, device), *options)


@pytest.mark.parametrize(("width", "directions"), [(16, 16), (64, 30), (71, 5)])
@pytest.mark.parametrize("case", ["batched, given", "shared, own"])
def test_sizes(device, case, width, directions):
    check(inputs(case, device, batch=1, width=width, directions=directions))


@pytest.mark.parametrize("case", ["batched, own", "shared, given"])
def test_tokens_in_half_precision(device, case):
    """Fewer digits, as many as float16 has."""
    arguments, d_mean = inputs(case, device, batch=2, width=17), D_MEAN.to(device)
    values = fused.forward(*arguments, True, True, True, True)
    found = [*values, *fused.backward(*arguments, *values[1:], True, True, d_mean, True)]
    expected = expected_of(arguments)
    assert_near(found, expected, 1e-3)
    with pytest.raises(AssertionError):
        assert_near(found, expected, 1e-5)


@pytest.fixture
def small_blocks(monkeypatch):
    """So that small tensors take several."""
    monkeypatch.setattr(fused, "_BLOCK", 16)
    monkeypatch.setattr(fused, "_TILE", 16)
    monkeypatch.setattr(fused, "_SEQUENCES", 4)
    monkeypatch.setattr(fused, "_PARTS", 2)


@pytest.mark.parametrize(("width", "directions"), [(37, 3), (19, 17), (3, 37)])
@pytest.mark.parametrize("case", ["batched, own", "shared, given"])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_a_matrix(device, case, width, directions):
    check(inputs(case, device, batch=1, width=width, directions=directions))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (17, 1), (2, 5)])
@pytest.mark.parametrize("case", ["batched, own", "shared, given"])
@pytest.mark.usefixtures("small_blocks")
def test_numbers_of_sequences_and_heads(device, case, batch, heads):
    check(inputs(case, device, batch=batch, heads=heads, width=3, directions=2))


@pytest.mark.parametrize("case", ["batched, given", "shared, own"])
def test_sequences_without_tokens_add_nothing(device, case):
    *tensors, num_queries, num_keys = inputs(case, device)
    mean, _, _, *grads = run([*tensors, torch.zeros_like(num_queries), num_keys])
    assert mean == 0
    for grad in grads:
        assert not grad.any()


def test_what_stands_in_sequences_without_tokens_is_not_in_the_value(device):
    gram_q, *others = inputs("shared, own", device)
    poisoned = gram_q.clone()
    poisoned[1] = float("nan")
    values = (fused.forward(gram, *others, True, True, True)[0] for gram in (poisoned, gram_q))
    assert torch.equal(*values)


@pytest.mark.parametrize("case", ["batched, given", "shared, own"])
def test_views(device, case):
    """Weights with heads before sequences are read where they lie; the others are copied."""
    arguments = inputs(case, device)
    gram_q, gram_k, w_e, w_r, lambda_diag, trace, num_queries, num_keys = arguments
    views = [
        gram_q.mT.contiguous().mT,
        gram_k.transpose(0, 1).contiguous().transpose(0, 1),
        w_e.transpose(0, -3).contiguous().transpose(0, -3),
        w_r.mT.contiguous().mT,
        lambda_diag.mT.contiguous().mT,
        None if trace is None else torch.stack([trace, trace], 1)[:, 0],
        torch.stack([num_queries, num_queries], 1)[:, 0],
        torch.stack([num_keys, num_keys], 1)[:, 0],
    ]
    assert_bits(run(views), run(arguments))


@cases
def test_the_compiler_is_told_of_what_comes_out(device, case):
    arguments = inputs(case, device)
    found = run(arguments)
    assert_laid_out(found[:3], composed._empty_outputs(*arguments))
    assert_laid_out(found[3:], composed._empty_gradients(*arguments))


def test_what_the_fused_op_does_not_take(device):
    arguments = inputs("batched, own", device)
    assert fused.takes(*arguments)
    assert not fused.takes(*(None if x is None else x.double() for x in arguments))
    gram_q, gram_k, w_e, *rest = arguments
    assert not fused.takes(gram_q[:0], gram_k[:0], w_e[:0], *rest)
    wide = gram_q[..., :1, :1].expand(*gram_q.shape[:2], 257, 257)
    assert not fused.takes(wide, wide, w_e, *rest)


@pytest.mark.parametrize(("rows", "dtype"), [(5, torch.float32), (601, torch.bfloat16)])
def test_trace(device, rows, dtype):
    w_e, w_r = (randn(3, rows, 7, seed=i).to(dtype).to(device) for i in range(2))
    d_trace = randn(3, seed=2).float().to(device)
    assert fused_trace.takes(w_e, w_r) and not fused_trace.takes(w_e.double(), w_r.double())
    value = fused_trace.forward(w_e, w_r)
    assert_near([value], in_double(lambda *x: [plain_trace(*x)], [w_e, w_r]), 1e-6)
    assert value.dtype == torch.float32
    grads = fused_trace.backward(w_e, w_r, d_trace)
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    expected = [d_trace.double()[:, None, None] * w.double() for w in (w_r, w_e)]
    assert_near(grads, expected, TOLERANCES[dtype])
