"""Packed sequences give what the same sequences give when they are padded and masked."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention import ksvd_loss, record_ksvd

from .dense import D, H, S, assert_close, assert_same_with_gradients, build, randn

LENGTHS = [7, 0, 23, 1, 0, 13, 2]  # 21 landmarks: fewer and more than tokens
OBJECTIVES = ["zero", "released", "released_batch", "explained_energy"]
FORMS = [
    {"weights": weights, "causal": causal, "feature_map": feature_map}
    for weights, causal in (
        ("static", False),
        ("sampled", False),
        ("dual", False),
        ("static", True),
        ("dual", True),
    )
    for feature_map in ("cosine", "exponential", ("elu", "identity"))
]
COSINE = [form for form in FORMS if form["feature_map"] == "cosine"]


def name_of(form):
    return f"{form['weights']} {'causal ' if form['causal'] else ''}{form['feature_map']}"


forms = pytest.mark.parametrize("form", FORMS, ids=name_of)
cosine_forms = pytest.mark.parametrize("form", COSINE, ids=name_of)


def bounds_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def padded(x, lengths, filling=float("nan")):
    """The sequences of x [T, D] with poisoned padding, and their mask."""
    parts = x.split(lengths)
    longest = max(lengths)
    rows = [torch.cat([p, x.new_full((longest - len(p), x.shape[1]), filling)]) for p in parts]
    mask = torch.arange(longest, device=x.device) < torch.tensor(lengths, device=x.device)[:, None]
    return torch.stack(rows), mask


def padded_outputs(layer, x, lengths):
    """Outputs [T, D] of the layer that is given padding and a mask."""
    tokens, mask = padded(x, lengths)
    return layer(tokens, token_mask=mask)[mask]


def with_objectives(layer, outputs):
    """Outputs and objectives of the latest pass as one vector, for gradients of all of them."""
    losses = [ksvd_loss(layer), ksvd_loss(layer, objective="explained_energy")]
    return torch.cat([outputs.flatten(), torch.stack(losses)])


@forms
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_padded_sequences(form, training):
    layer = build(**form).train(training)
    x = randn(sum(LENGTHS), D).requires_grad_()
    got = layer(x, cu_seqlens=bounds_of(LENGTHS))
    assert_same_with_gradients(layer, got, padded_outputs(layer, x, LENGTHS), [x])


@forms
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_those_of_padded_sequences(form, objective):
    layer = build(**form).train()
    x = randn(sum(LENGTHS), D).requires_grad_()
    layer(x, cu_seqlens=bounds_of(LENGTHS))
    got = ksvd_loss(layer, objective=objective)
    padded_outputs(layer, x, LENGTHS)
    want = ksvd_loss(layer, objective=objective)
    assert want > 0
    assert_same_with_gradients(layer, got, want, [x])


@given(
    lengths=st.lists(st.integers(0, 19), min_size=1, max_size=6).filter(any),
    form=st.sampled_from(FORMS),
    extra=st.one_of(st.none(), st.integers(0, 40)),
)
@example(  # one token, whose query is nearly orthogonal to its key
    lengths=[19, 19, 1],
    form={"weights": "sampled", "causal": False, "feature_map": "cosine"},
    extra=None,
)
@settings(max_examples=100, deadline=None)
def test_any_lengths(lengths, form, extra):
    """Give the longest length, an upper bound of it, or none."""
    layer = build(**form).train()
    x = randn(sum(lengths), D).requires_grad_()
    max_seqlen = None if extra is None else max(lengths) + extra
    for energy in (False, True):  # explained energy, the last of them, by itself
        y = layer(x, cu_seqlens=bounds_of(lengths, torch.int64), max_seqlen=max_seqlen)
        got = with_objectives(layer, y)
        want = with_objectives(layer, padded_outputs(layer, x, lengths))
        if energy:
            bound = 10 * torch.finfo(torch.float64).eps * cancellation(layer)
            tolerance = max(1e-10, bound)
            assert_same_with_gradients(layer, got[-1], want[-1], [x], tolerance)
        else:
            assert_same_with_gradients(layer, got[:-1], want[:-1], [x])


@torch.no_grad()
def cancellation(layer):
    """Ratio of the largest term of the kernel's energy to their sum."""
    (run,) = layer.passes.runs
    gram_q, gram_k = run.sums.grams
    middle = torch.eye(gram_q.shape[-1]).double()
    if run.x_sampled is not None:
        middle = run.x_sampled.mT @ run.x_sampled
    products = [gram_q @ middle, middle @ gram_k]
    energy = (products[0] * products[1]).sum((-2, -1))
    terms = (gram_q.abs() @ middle.abs()) * (middle.abs() @ gram_k.abs())
    return float((terms.sum((-2, -1)) / energy)[energy > 0].max())


@forms
@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("changed", [0, 2, 3, 6])
def test_neighbours_are_not_seen(form, changed, filling):
    """Not in the outputs, and not in the gradients that these have."""
    layer = build(**form).train()
    bounds = bounds_of(LENGTHS)
    other = [b for b, n in enumerate(LENGTHS) if b != changed and n]
    results = []
    for value in (0.5, filling):
        x = randn(sum(LENGTHS), D)
        x[bounds[changed] : bounds[changed + 1]] = value
        x.requires_grad_()
        outputs = layer(x, cu_seqlens=bounds).split(LENGTHS)
        kept = torch.cat([outputs[b] for b in other])
        (gradient,) = torch.autograd.grad(kept.square().sum(), x)
        results.append((kept, torch.cat([gradient.split(LENGTHS)[b] for b in other])))
    for one, other_one in zip(*results, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other_one)


@cosine_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(form, dtype):
    layer = build(**form, dtype=dtype).train()
    x = randn(sum(LENGTHS), D, dtype=dtype).requires_grad_()
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    got = layer(x, cu_seqlens=bounds_of(LENGTHS))
    assert got.dtype == dtype
    assert_close(got, padded_outputs(layer, x, LENGTHS), tolerance)
    layer(x, cu_seqlens=bounds_of(LENGTHS))
    got = ksvd_loss(layer, objective="explained_energy")
    assert got.dtype == torch.float32
    padded_outputs(layer, x, LENGTHS)
    assert_close(got, ksvd_loss(layer, objective="explained_energy"), tolerance)


@cosine_forms
def test_autocast(form):
    layer = build(**form, dtype=torch.float32).train()
    x = randn(sum(LENGTHS), D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x, cu_seqlens=bounds_of(LENGTHS))
        want = padded_outputs(layer, x, LENGTHS)
    assert got.dtype == want.dtype
    assert_close(got, want, 3e-2)


@cosine_forms
def test_a_batch_of_one_is_the_same(form):
    layer = build(**form)
    x = randn(sum(LENGTHS), D)
    want = layer(x, cu_seqlens=bounds_of(LENGTHS))
    got = layer(x[None], cu_seqlens=bounds_of(LENGTHS))
    assert want.shape == (sum(LENGTHS), D)
    assert torch.equal(got, want[None])


@cosine_forms
def test_one_sequence_is_no_packing(form):
    layer = build(**form)
    x = randn(1, 23, D).requires_grad_()
    got = layer(x, cu_seqlens=bounds_of([23]))
    assert_same_with_gradients(layer, got, layer(x), [x])


@pytest.mark.parametrize("options", [{"landmark_jitter": 1.5}, {"landmark_dropout": 0.4}])
def test_landmarks_are_drawn_as_for_padded_sequences(options):
    layer = build(**options).train()
    x = randn(sum(LENGTHS), D).requires_grad_()
    torch.manual_seed(3)
    got = layer(x, cu_seqlens=bounds_of(LENGTHS))
    torch.manual_seed(3)
    want = padded_outputs(layer, x, LENGTHS)
    assert_same_with_gradients(layer, got, want, [x])
    assert not torch.equal(got, layer(x, cu_seqlens=bounds_of(LENGTHS)))


@pytest.mark.parametrize("scores", ["e", "r"])
@cosine_forms
def test_one_side_without_biases(form, scores):
    layer = build(**form, scores=scores, bias=False).train()
    x = randn(sum(LENGTHS), D).requires_grad_()
    got = layer(x, cu_seqlens=bounds_of(LENGTHS))
    assert_same_with_gradients(layer, got, padded_outputs(layer, x, LENGTHS), [x])


def test_dropout_falls_on_all_tokens():
    layer = build(dropout=0.5).train()
    y = layer(randn(sum(LENGTHS), D), cu_seqlens=bounds_of(LENGTHS))
    assert 0.3 < (y == 0).double().mean() < 0.7


@cosine_forms
def test_packed_runs_are_recorded_beside_padded_ones(form):
    """Each sequence counts once, whichever way it came."""
    layer = build(**form).train()
    x, y = randn(sum(LENGTHS), D), randn(11, D, seed=1)
    with record_ksvd(layer):
        layer(x, cu_seqlens=bounds_of(LENGTHS))
        layer(y[None])
    got = ksvd_loss(layer)
    layer(torch.cat([x, y]), cu_seqlens=bounds_of([*LENGTHS, 11]))
    assert_close(got, ksvd_loss(layer))


@cosine_forms
def test_gradients_of_gradients(form):
    layer = build(**form)
    x = randn(12, D).requires_grad_()
    bounds = bounds_of([5, 0, 7])
    assert torch.autograd.gradgradcheck(
        lambda x: layer(x, cu_seqlens=bounds), (x,), fast_mode=True, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("form", [*COSINE, FORMS[-2]], ids=name_of)
def test_one_graph_under_compile(form):
    """Other lengths run through the same graph, where tokens and sequences are as many."""
    torch.compiler.reset()
    layer = build(**form).train()
    x = randn(sum(LENGTHS), D).requires_grad_()

    def step(x, cu_seqlens):
        return with_objectives(layer, layer(x, cu_seqlens=cu_seqlens, max_seqlen=31))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (LENGTHS, sorted(LENGTHS), [0, 5, 0, 1, 29, 4, 7]):
            got, want = compiled(x, bounds_of(lengths)), step(x, bounds_of(lengths))
            assert_same_with_gradients(layer, got, want, [x], 1e-12)


BAD = [
    ({"cu_seqlens": torch.tensor([0.0, 46.0])}, r"cu_seqlens .*int32.*float32.*\.int\(\)"),
    ({"cu_seqlens": torch.tensor([[0, 46]])}, r"cu_seqlens .*\[sequences \+ 1\].*\[1, 2\]"),
    ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens .*one sequence.*\[1\]"),
    ({"cu_seqlens": torch.tensor([1, 46])}, r"cu_seqlens .*start at 0.*got 1"),
    ({"cu_seqlens": torch.tensor([0, 45])}, r"cu_seqlens .*end at .*46.*got 45"),
    ({"cu_seqlens": torch.tensor([0, 47])}, r"cu_seqlens .*end at .*46.*got 47"),
    ({"cu_seqlens": torch.tensor([0, 9, 5, 46])}, r"cu_seqlens .*not decrease.*-4"),
    ({"cu_seqlens": torch.tensor([0, 46], device="meta")}, r"cu_seqlens .*device cpu.*meta"),
    ({"max_seqlen": 22}, r"max_seqlen .*23.*got 22"),
    ({"max_seqlen": 0}, r"max_seqlen .*at least 1.*got 0"),
    ({"cu_seqlens": None, "max_seqlen": 23}, r"max_seqlen=23 .*without cu_seqlens"),
    ({"token_mask": torch.ones(1, 46).bool()}, r"token_mask \[1, 46\] .*cu_seqlens"),
    ({"context": randn(1, 46, D)}, r"context \[1, 46, 15\] .*cu_seqlens"),
    ({"context_mask": torch.ones(1, 46).bool()}, r"context_mask \[1, 46\] .*cu_seqlens"),
    ({"x": randn(2, 23, D)}, r"x .*\[1, tokens, 15\].*got \[2, 23, 15\]"),
    ({"x": randn(46, D + 1)}, r"x .*\[tokens, 15\].*got \[46, 16\]"),
    ({"x": randn(D)}, r"x .*\[tokens, 15\].*got \[15\]"),
    ({"x": randn(0, D)}, r"x .*at least one token.*got \[0, 15\]"),
    ({"x": torch.ones(46, D).int()}, r"x .*floating-point.*int32"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("weights", ["static", "sampled"])
def test_what_does_not_fit_is_refused(weights, arguments, message):
    layer = build(weights=weights)
    fitting = {"x": randn(46, D), "cu_seqlens": bounds_of(LENGTHS)}
    with pytest.raises(ValueError, match=message):
        layer(**(fitting | arguments))
    layer(**fitting)


def test_the_longest_length_is_asked_for_under_compile():
    layer = build().eval()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="max_seqlen must be given"):
        compiled(randn(46, D), cu_seqlens=bounds_of(LENGTHS))


class Sizes(TorchDispatchMode):
    """The number of elements of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.largest = max([self.largest, *(t.numel() for t in made if hasattr(t, "numel"))])
        return result


@cosine_forms
def test_what_is_padded_and_to_which_length(form):
    layer = build(**form).eval()
    lengths = [1] * 40 + [41]
    with Sizes() as sizes:
        layer(randn(81, D), cu_seqlens=bounds_of(lengths))
    # Both sides of the kernel, the dual variables of both, or the kernel values of 41 tokens.
    widest = max(2 * D, 2 * H * S, 2 * H * 41)
    assert 41 * 41 * D <= sizes.largest <= 41 * 41 * widest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # by intent
@forms
def test_on_a_gpu_one_cuda_graph_takes_any_lengths(form, dtype):
    """Captured once with its backward pass, replayed with other lengths in the same memory."""
    layer = build(**form, dtype=dtype).train().cuda()
    x = randn(46, D, dtype=dtype).cuda().requires_grad_()
    bounds = bounds_of(LENGTHS).cuda()

    def step():
        with record_ksvd(layer):
            y = layer(x, cu_seqlens=bounds, max_seqlen=31)
        losses = with_objectives(layer, y)
        return losses, *torch.autograd.grad(losses.square().sum(), [x, *layer.parameters()])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tolerance = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    for lengths in (LENGTHS, sorted(LENGTHS), [0, 5, 0, 1, 29, 4, 7]):
        bounds.copy_(bounds_of(lengths))
        graph.replay()
        got = [result.detach().clone() for result in captured]
        want = with_objectives(layer, padded_outputs(layer, x, lengths))
        gradients = torch.autograd.grad(want.square().sum(), [x, *layer.parameters()])
        for one, other in zip(got, (want, *gradients), strict=True):
            one, other = one.detach().double(), other.detach().double()
            error = (one - other).norm() / other.norm().clamp(min=1e-3)
            assert error <= tolerance
