"""The eager ops against their formulas, one token after another, in float64."""

import pytest
import torch

from primal_attention.ops.causal import running_mean, scan, token_counts
from primal_attention.ops.landmarks import Landmarks, sampled_weights
from primal_attention.ops.op import chunk_elements
from primal_attention.ops.primal import Attended, collapsed_attention, gram, moment

from .formulas import (
    MAPS,
    MASKS,
    B,
    C,
    H,
    N,
    S,
    assert_same,
    dense_moment,
    dense_primal,
    dense_scan,
    dense_timed,
    randn,
    real,
)


@pytest.fixture(params=[1, 1 << 20], ids=["chunks", "whole"], autouse=True)
def chunks(request):
    with chunk_elements(request.param):
        yield


def heads_first(z):
    """[B, N, H, .] as the eager ops take it."""
    return z.permute(2, 0, 1, 3)


def of_rows(mask):
    return None if mask is None else mask[:, :, None]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lead", [(B, H), (H,)])
def test_outputs_and_gram_matrices(mask, lead):
    tokens = [randn(B, N, H, C), randn(B, N, H, C, seed=1)]
    weights = [randn(*lead, C, S, seed=2), randn(*lead, C, S, seed=3)]
    maps = [randn(S, C, seed=4), randn(S, C, seed=5), randn(C, seed=6)]

    def run(q, k, w_e, w_r, c_e, c_r, bias):
        options = {"token_mask": MASKS[mask], "map_k": "elu"}
        return collapsed_attention(Attended(q, k, w_e @ c_e, w_r @ c_r, bias, **options))

    def formula(*x):
        return dense_primal(*x, token_mask=MASKS[mask], map_k="elu")

    assert_same(run, formula, [*tokens, *weights, *maps])


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("mask", ["none", "empty"])
def test_moments(mask, feature_map):
    def run(z, values):
        rows = heads_first(z), heads_first(values)
        return (moment(*rows, (feature_map,), of_rows(MASKS[mask])).transpose(0, 1),)

    def formula(z, values):
        return dense_moment(z, values, token_mask=MASKS[mask], feature_map=feature_map)

    assert_same(run, formula, [randn(B, N, H, C), randn(B, N, H, S, seed=1)])


def test_gram_matrices_are_moments_of_features():
    z, mask = randn(B, N, H, C), MASKS["holes"]
    found = gram(heads_first(z)[None], ("cosine",), of_rows(mask))[0].transpose(0, 1)
    (expected,) = dense_moment(z, MAPS["cosine"](z), token_mask=mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("maps", [("cosine", "cosine"), ("elu", "relu")])
@pytest.mark.parametrize("mask", ["none", "empty"])
def test_scans(mask, maps, with_state):
    def run(q, k, values, state):
        before = None if state is None else state.transpose(0, 1)[None]
        z = torch.stack((heads_first(q), heads_first(k)))
        out, after = scan(z, heads_first(values)[None], maps, of_rows(MASKS[mask]), before)
        return out[0].permute(1, 2, 0, 3), after[0].transpose(0, 1)

    def formula(q, k, values, state):
        options = {"token_mask": MASKS[mask], "map_q": maps[0], "map_k": maps[1]}
        return dense_scan(q, k, values, None, state, **options)

    tokens = [randn(B, N, H, C), randn(B, N, H, C, seed=1), randn(B, N, H, S, seed=2)]
    assert_same(run, formula, [*tokens, randn(B, H, C, S, seed=3) if with_state else None])


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize("length", [1, 7, 130])
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_scans_with_a_learned_time(masked, sides, length, future):
    """The dense sums of the kernel, and so their gradients, in blocks and with time to forget."""
    mask = None
    if masked:
        mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.4
        mask[-1, length // 2 :] = False

    def steps_of(logits):
        steps = 2.0 * logits.exp()
        return steps if mask is None else torch.where(mask, steps, 0.0)

    def run(z, values, logits):
        out, after = scan(
            z, values, ("elu", "relu"), of_rows(mask), steps=steps_of(logits), future=future
        )
        return (out,) if future else (out, after)

    def formula(z, values, logits):
        return dense_timed(z, values, steps_of(logits), ("elu", "relu"), mask, future=future)

    z, values = randn(2, H, 2, length, C), randn(sides, H, 2, length, S, seed=1)
    logits = 2.0 * randn(H, 2, length, seed=2).detach()
    assert_same(run, formula, [z, values, logits.requires_grad_()])


@pytest.mark.parametrize("half_life", [1.0, 1e3, 1e6])
def test_gradients_of_time_for_short_and_long_half_lives(half_life):
    """In float32, against float64: of the derivative by each step no digits get lost."""
    N, step = 300, torch.tensor(2.0).log().item() / half_life
    z, values = randn(2, H, 2, N, C), randn(2, H, 2, N, S, seed=1)
    weights = randn(2, H, 2, N, S, seed=3)
    found = []
    for dtype in (torch.float32, torch.float64):
        steps = torch.full((H, 2, N), step, dtype=dtype, requires_grad=True)
        given = z.to(dtype), values.to(dtype), ("elu", "elu"), None
        out = sum(scan(*given, steps=steps, future=future)[0] for future in (False, True))
        (found_steps,) = torch.autograd.grad((out * weights.to(dtype)).sum(), steps)
        found += [found_steps.double(), out.detach().double()]
    for got, expected in zip(found[:2], found[2:], strict=True):
        assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_running_means(mask):
    mask, z, total = MASKS[mask], randn(H, B, N, C), randn(H, B, 1, C, seed=1)
    counts = token_counts(z[0], mask, torch.full((B,), 2))[:, :, None]
    mean, after = running_mean(z, of_rows(mask), counts, total)
    for b in range(B):
        memory, number = total[:, b, 0].clone(), 2
        for t in range(N):
            if real(mask, b, t):
                memory, number = memory + z[:, b, t], number + 1
            torch.testing.assert_close(mean[:, b, t], memory / number)
        torch.testing.assert_close(after[:, b, 0], memory)


def test_weights_that_are_sampled():
    x, parameters = randn(B, N, H * C), randn(H, 4, 2 * S, seed=1)
    positions = torch.tensor([[3, 3, -1, 0], [22, 1, 5, -1]])
    e, r = sampled_weights(Landmarks(x, positions, 1.5), parameters)
    for b in range(B):
        for h in range(H):
            expected = sum(
                torch.outer(1.5 * x[b, n, h * C : h * C + C], parameters[h, m])
                for m, n in enumerate(positions[b].tolist())
                if n >= 0
            )
            torch.testing.assert_close(torch.cat((e[h, b], r[h, b]), -1), expected)
