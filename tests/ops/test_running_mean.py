import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.running_mean import reference, running_mean, token_counts

from .formulas import (
    MASKS,
    B,
    C,
    H,
    N,
    assert_close,
    assert_identical,
    assert_same,
    gradients,
    randn,
    real,
    stacked,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """23 tokens are a whole piece and a ragged one."""
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def dense(z, mask, before, count_before):
    """Mean over the real tokens up to each, one token after another."""
    mean = [[None] * N for _ in range(B)]
    last = [None] * B
    for b in range(B):
        total, count = before[b], float(count_before[b])
        for t in range(N):
            if real(mask, b, t):
                total, count = total + z[b, t], count + 1
            mean[b][t] = total / max(count, 1)
        last[b] = total
    return stacked(mean), stacked(last)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("later", [False, True], ids=["from the start", "after a state"])
def test_means_totals_and_gradients(mask, later):
    token_mask = MASKS[mask]
    count = torch.tensor([4.0, 0.0]) if later else torch.zeros(B)
    before = randn(B, H, C, seed=1) * (count > 0)[:, None, None]

    def means(z, before):
        if not later:
            return running_mean(z, token_counts(z, token_mask, None), token_mask=token_mask)
        counts = token_counts(z, token_mask, count)
        return running_mean(z, counts, token_mask=token_mask, before=before)

    z = randn(B, N, H, C)
    got = gradients(means, [z, before])
    want = gradients(lambda z, before: dense(z, token_mask, before, count), [z, before])
    for actual, expected in zip(got[0], want[0], strict=True):
        assert_close(actual, expected)
    assert_close(got[1][0], want[1][0])
    if later:
        assert_close(got[1][1], want[1][1])


def test_counts_are_of_the_real_tokens():
    z = randn(B, N, H, C)
    for mask in MASKS.values():
        counts = token_counts(z, mask, torch.tensor([3.0, 0.0]))
        for b in range(B):
            seen = [3, 0][b]
            for t in range(N):
                seen += real(mask, b, t)
                assert counts[b, t] == seen


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_at_masked_tokens_reaches_nothing(bad):
    mask = MASKS["empty"]
    z = randn(B, N, H, C)
    counts = token_counts(z, mask, None)

    def means(z):
        return running_mean(z, counts, token_mask=mask)

    poisoned = torch.where(mask[..., None, None], z, bad)
    assert_identical(gradients(means, [poisoned]), gradients(means, [z]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_kept_in_float32(dtype):
    z = torch.ones(1, 5000, 1, 1, dtype=dtype)  # a bfloat16 sum of ones stops at 256
    result = running_mean(z, token_counts(z, None, None))
    assert result.mean.dtype == dtype
    assert result.total.dtype == torch.float32
    assert result.total.item() == 5000
    assert (result.mean == 1).all()


@pytest.mark.parametrize("mask", MASKS)
def test_in_pieces_it_equals_the_reference(mask):
    z, before = randn(B, N, H, C), randn(B, H, C, seed=1)
    counts = token_counts(z, MASKS[mask], torch.tensor([4.0, 2.0]))

    def of(op):
        return lambda z, before: op(z, counts, token_mask=MASKS[mask], before=before)

    assert_same(of(running_mean), of(reference.running_mean), [z, before])


@pytest.mark.parametrize("mask", ["none", "empty"])
def test_as_pytorch_sees_it(mask):
    """Its registration, and gradients of gradients, which are the op itself."""
    z, before = (randn(*shape).requires_grad_() for shape in ((B, N, H, 2), (B, H, 2)))
    counts = token_counts(z, MASKS[mask], None)

    def means(z, before):
        return running_mean(z, counts, token_mask=MASKS[mask], before=before)

    assert torch.autograd.gradcheck(means, [z, before], fast_mode=True)
    assert torch.autograd.gradgradcheck(means, [z, before], fast_mode=True)
    for name, arguments in (
        ("running_mean_forward", (z, before, counts, MASKS[mask])),
        ("running_mean_forward", (z.detach().mT.contiguous().mT, None, counts, MASKS[mask])),
        ("running_mean_backward", (z, before, counts, MASKS[mask])),
    ):
        op = getattr(torch.ops.primal_attention, name).default
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_the_given_sum_is_not_written_to():
    z, before = randn(B, N, H, C), randn(B, H, C, seed=1)
    given = before.clone()
    running_mean(z, token_counts(z, None, None), before=before)
    assert torch.equal(before, given)
