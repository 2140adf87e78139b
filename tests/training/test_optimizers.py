"""RAdam in few launches against the one of torch."""

from itertools import pairwise

import pytest
import torch

from primal_attention.training.optimizers import LeanRAdam

SIZES = [(7, 5), (3,), (2, 11), ()]


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for size in SIZES]


def trained(kind, steps, lr=1e-2, **settings):
    """The parameters after each step, with gradients that a seed draws."""
    values, generator = parameters(), torch.Generator().manual_seed(1)
    optimizer = kind(values, lr=lr, **settings)
    history = []
    for _ in range(steps):
        for value in values:
            value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        optimizer.step()
        history.append([value.detach().clone() for value in values])
    return history, optimizer


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-3}],
    ids=["plain", "decay", "betas"],
)
def test_every_step_is_that_of_torch(settings):
    steps = 23  # the second moments are used from the sixth on
    ours, _ = trained(LeanRAdam, steps, **settings)
    theirs, _ = trained(torch.optim.RAdam, steps, **settings)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert all(not torch.equal(a[0], b[0]) for a, b in pairwise(ours))


def test_the_learning_rate_may_be_a_tensor():
    ours, _ = trained(LeanRAdam, 9, lr=torch.tensor(1e-2))
    theirs, _ = trained(torch.optim.RAdam, 9)
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-6, atol=1e-8)


def test_the_state_is_that_of_torch():
    _, ours = trained(LeanRAdam, 9)
    _, theirs = trained(torch.optim.RAdam, 9)
    for one, other in zip(
        ours.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True
    ):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-8)


def test_parameters_without_a_gradient_stay():
    values = parameters()
    optimizer = LeanRAdam(values, lr=1e-2)
    before = [value.detach().clone() for value in values]
    for value in values[1:]:
        value.grad = torch.ones_like(value)
    optimizer.step()
    assert torch.equal(values[0], before[0])
    assert all(not torch.equal(a, b) for a, b in zip(values[1:], before[1:], strict=True))
    assert values[0] not in optimizer.state or not optimizer.state[values[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_steps_are_those_of_torch():
    device = torch.device("cuda")
    ours, theirs = ([x.detach().to(device).requires_grad_() for x in parameters()] for _ in "ab")
    lr = torch.tensor(1e-2, device=device)
    lean = LeanRAdam(ours, lr=lr, capturable=True)
    plain = torch.optim.RAdam(theirs, lr=1e-2)
    gradients = [torch.randn_like(x) for x in ours]

    def step(optimizer, values):
        for value, gradient in zip(values, gradients, strict=True):
            value.grad = gradient
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(lean, ours)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(lean, ours)
    for _ in range(11):
        graph.replay()
    for _ in range(12):
        step(plain, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
