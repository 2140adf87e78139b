"""The walk in chunks against one call of the step: values, gradients and their gradients."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from primal_attention.ops.causal import running_mean, scan
from primal_attention.ops.op import chunk_elements
from primal_attention.ops.primal import gram, moment, primal_scores

H, B, N, C, S = 2, 3, 67, 5, 7
MAPS = ("cosine", "elu")


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def mask():
    real = torch.rand(B, N, generator=torch.Generator().manual_seed(9)) > 0.3
    real[-1] = False
    return real[:, :, None]


def scores(z, w, real):
    return (primal_scores(z, w, MAPS, real),)


def moments(z, h, real):
    return (moment(z, h, MAPS, real),)


def grams(z, real):
    return (gram(z, MAPS, real),)


def scanned(z, values, state, real):
    return scan(z, values, MAPS, real, state)


def timed(z, h, state, logits, real):
    return scan(z, h, MAPS, real, state, steps=steps_of(logits, real))


def timed_both_ways(z, h, logits, real):
    return (scan(z, h, MAPS, real, steps=steps_of(logits, real), future=True)[0],)


def steps_of(logits, real):
    steps = torch.nn.functional.softplus(logits)
    return steps if real is None else torch.where(real[:, :, 0], steps, 0.0)


CASES = {
    "scores": (scores, [randn(2, H, B, N, C), randn(2, H, B, C, S, seed=1)]),
    "shared scores": (scores, [randn(2, H, B, N, C), randn(2, H, C, S, seed=1)]),
    "moment": (moments, [randn(2, H, B, N, C), randn(2, H, B, N, S, seed=1)]),
    "gram": (grams, [randn(2, H, B, N, C)]),
    "scan": (
        scanned,
        [
            randn(2, H, B, N, C),
            randn(1, H, B, N, S, seed=2),
            randn(1, H, B, C, S, seed=3),
        ],
    ),
    "timed": (
        timed,
        [
            randn(2, H, B, N, C),
            randn(2, H, B, N, S, seed=1),
            randn(2, H, B, C, S, seed=2),
            randn(H, B, N, seed=3),
        ],
    ),
    "timed both ways": (
        timed_both_ways,
        [randn(2, H, B, N, C), randn(1, H, B, N, S, seed=1), randn(H, B, N, seed=3)],
    ),
    "dual": (
        scanned,
        [randn(2, H, B, N, C), randn(2, H, B, N, S, seed=1), randn(2, H, B, C, S, seed=2)],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=[False, True], ids=["all real", "masked"])
def real(request):
    return mask() if request.param else None


def one_chunk(function, inputs, real):
    with chunk_elements(1 << 40):
        return function(*inputs, real)


def many_chunks(function, inputs, real):
    with chunk_elements(1):
        return function(*inputs, real)


def loss(outputs):
    return sum((y * torch.cos(torch.arange(y.numel()).view_as(y))).sum() for y in outputs)


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_values_and_gradients(case, real):
    function, inputs = case
    got, want = (run(function, inputs, real) for run in (many_chunks, one_chunk))
    assert_close(got, want)
    assert_close(torch.autograd.grad(loss(got), inputs), torch.autograd.grad(loss(want), inputs))


def test_a_gradient_of_one_input_alone(case):
    function, inputs = case
    for chosen in range(len(inputs)):
        given = [x if i == chosen else x.detach() for i, x in enumerate(inputs)]
        got, want = (run(function, given, None) for run in (many_chunks, one_chunk))
        assert_close(
            torch.autograd.grad(loss(got), given[chosen]),
            torch.autograd.grad(loss(want), given[chosen]),
        )


def from_one_another(inputs):
    """Tensors of a graph: each depends on the first input too."""
    first, *rest = inputs
    return [torch.sin(first), *(each + first.mean() for each in rest)]


def test_gradients_of_gradients(case, real):
    function, inputs = case
    found = []
    for run in (many_chunks, one_chunk):
        outputs = run(function, from_one_another(inputs), real)
        first = torch.autograd.grad(loss(outputs), inputs, create_graph=True)
        second = torch.autograd.grad(loss(first), inputs, materialize_grads=True)
        found.append([*first, *second])
    assert_close(*found)
    outputs = many_chunks(function, from_one_another(inputs), real)
    assert_close(found[0][: len(inputs)], torch.autograd.grad(loss(outputs), inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
def test_forward_mode(case, real):
    function, inputs = case
    tangents = [torch.randn_like(x) for x in inputs]
    found = []
    for run in (many_chunks, one_chunk):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
            found.append([forward_ad.unpack_dual(y).tangent for y in run(function, duals, real)])
    assert_close(*found)
    assert all(tangent.abs().max() > 0 for tangent in found[0])


def test_transforms(case):
    function, inputs = case

    def total(*given):
        return loss(function(*given, None))

    with chunk_elements(1):
        got = torch.func.grad(total, argnums=tuple(range(len(inputs))))(*inputs)
    assert_close(got, torch.autograd.grad(loss(one_chunk(function, inputs, None)), inputs))


def test_a_state_goes_on():
    """Two halves with a state between them are the whole."""
    z, h = randn(2, H, B, N, C), randn(2, H, B, N, S, seed=1)
    run = partial(scan, maps=MAPS, mask=None)
    whole, after = run(z, h, state=None)
    first, between = run(z[..., :30, :], h[..., :30, :], state=None)
    second, last = run(z[..., 30:, :], h[..., 30:, :], state=between)
    assert_close((torch.cat((first, second), -2), last), (whole, after))


def test_running_means():
    z, real = randn(2, H, B, N, C), mask()
    counts = real.cumsum(1)
    mean, total = running_mean(z, real, counts)
    for t in (0, 13, N - 1):
        seen = (z * real)[..., : t + 1, :].sum(-2) / counts[:, t].clamp(min=1)
        assert_close([mean[..., t, :]], [seen])
    assert_close([total.squeeze(-2)], [(z * real).sum(-2)])


def test_a_scan_of_later_tokens_without_time_is_refused():
    z, h = torch.randn(2, 1, 1, 3, 5), torch.randn(2, 1, 1, 3, 2)
    with pytest.raises(ValueError, match="future=True needs steps"):
        scan(z, h, MAPS, None, future=True)
