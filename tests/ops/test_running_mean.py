import pytest
import torch

from primal_attention.ops.running_mean import running_mean, token_counts

from .formulas import (
    MASKS,
    B,
    C,
    H,
    N,
    assert_close,
    assert_identical,
    gradients,
    randn,
    real,
    stacked,
)


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
