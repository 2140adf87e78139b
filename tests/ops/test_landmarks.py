import pytest
import torch

from primal_attention.ops.landmarks import choose_landmarks
from primal_attention.ops.op import fused_ops

from .formulas import MASKS, B, N, randn, token_masks

D = 5


def landmarks(*given, **options):
    """X' [B, M, D]."""
    return choose_landmarks(*given, **options).rows()


def positions(x_sampled):
    """Which position of the sequence each landmark is: tokens are numbered in every channel."""
    assert (x_sampled == x_sampled[..., :1]).all(), "channels of one landmark from several tokens"
    return x_sampled[..., 0].long().tolist()


def numbered(length, batch=B):
    return torch.arange(length, dtype=torch.float64)[None, :, None].expand(batch, length, D)


def expected_positions(mask_row, num_landmarks):
    """The formula, in Python integers: landmark i is real token i (n-1) // max(M-1, 1)."""
    real = [position for position, is_real in enumerate(mask_row) if is_real]
    n = len(real)
    return [real[i * (n - 1) // max(num_landmarks - 1, 1)] for i in range(num_landmarks)]


@pytest.mark.parametrize("num_landmarks", [1, 2, 3, 7, 22, 23, 24, 61])
@pytest.mark.parametrize("length", [1, 2, 3, 23, 97])
def test_landmarks_are_evenly_spaced(length, num_landmarks):
    got = positions(landmarks(numbered(length), num_landmarks))
    assert got == [expected_positions([True] * length, num_landmarks)] * B
    assert got[0][0] == 0
    if num_landmarks > 1:
        assert got[0][-1] == length - 1
    if num_landmarks == length:
        assert got[0] == list(range(length))


@pytest.mark.parametrize("num_landmarks", [1, 2, 7, 23, 61])
@pytest.mark.parametrize("mask", ["padded", "holes"])
def test_landmarks_are_real_tokens_in_order(mask, num_landmarks):
    token_mask = MASKS[mask]
    got = positions(landmarks(numbered(N), num_landmarks, token_mask=token_mask))
    assert got == [expected_positions(row, num_landmarks) for row in token_mask.tolist()]


def test_every_mask_of_five_tokens():
    rows = [[bool(code >> bit & 1) for bit in range(5)] for code in range(1, 32)]
    for num_landmarks in (1, 2, 3, 5, 8):
        got = positions(
            landmarks(numbered(5, batch=31), num_landmarks, token_mask=torch.tensor(rows))
        )
        assert got == [expected_positions(row, num_landmarks) for row in rows]


@pytest.mark.parametrize(
    ("length", "count"),
    [(896, 300), (1024, 300), (2048, 200), (2048, 300), (4096, 200), (4096, 300), (405, 300)],
)
def test_landmarks_of_the_papers_settings_are_those_of_the_released_code(length, count):
    released = torch.linspace(0, length - 1, count).long().tolist()
    assert positions(landmarks(numbered(length, batch=1), count)) == [released]


def test_a_sequence_without_real_tokens_gives_zeros_and_takes_no_gradient():
    mask = MASKS["empty"]
    x = (randn(B, N, D) + 10).requires_grad_()
    x_sampled = landmarks(x, 7, token_mask=mask)
    assert not x_sampled[-1].any()
    assert (x_sampled[0] != 0).all()
    (gradient,) = torch.autograd.grad(x_sampled.sum(), x)
    assert not gradient[-1].any()
    assert gradient.sum().item() == pytest.approx(7 * D)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.4}, {"jitter": 2.0}])
def test_masked_tokens_are_never_landmarks(bad, options):
    mask = MASKS["empty"]
    x = torch.where(mask[..., None], randn(B, N, D), bad).requires_grad_()
    x_sampled = landmarks(x, 61, token_mask=mask, **options)
    assert x_sampled.isfinite().all()
    (gradient,) = torch.autograd.grad(x_sampled.sum(), x)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


def test_the_gradient_adds_up_where_tokens_repeat():
    x = randn(1, 3, D).requires_grad_()
    (gradient,) = torch.autograd.grad(landmarks(x, 7).sum(), x)
    counts = [expected_positions([True] * 3, 7).count(position) for position in range(3)]
    assert gradient[0, :, 0].tolist() == counts
    assert sum(counts) == 7


def test_a_batch_without_sequences():
    assert landmarks(randn(0, N, D), 7).shape == (0, 7, D)
    assert landmarks(randn(0, N, D), 7, token_mask=torch.ones(0, N).bool()).shape == (0, 7, D)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_landmarks_keep_the_dtype_and_the_bits(dtype):
    x = randn(B, N, D, dtype=dtype)
    x_sampled = landmarks(x, 7, token_mask=MASKS["padded"])
    assert x_sampled.dtype == dtype
    assert torch.equal(x_sampled[:, 0], x[:, 0])
    assert landmarks(x, 7, dropout=0.5).dtype == dtype


@pytest.mark.parametrize("dropout", [0.2, 0.5, 0.9])
def test_dropout_drops_whole_landmarks_and_rescales_the_rest(dropout):
    torch.manual_seed(0)
    batch, count = 400, 29
    x = torch.ones(batch, N, D, dtype=torch.float64)
    x_sampled = landmarks(x, count, dropout=dropout)
    kept = x_sampled[..., 0] != 0
    expected = kept[..., None].expand_as(x_sampled) / (1 - dropout)
    torch.testing.assert_close(x_sampled, expected.double(), rtol=1e-6, atol=0)
    # The number kept is binomial: within six standard deviations of its mean, so that the
    # expectation of each landmark is what it is without dropout.
    spread = (dropout * (1 - dropout) / (batch * count)) ** 0.5
    assert abs(kept.double().mean().item() - (1 - dropout)) < 6 * spread
    assert len({tuple(row) for row in kept.tolist()}) > 1, "one draw for all sequences"
    assert (kept.any(0) & ~kept.all(0)).all(), "one draw for all landmarks"


def test_dropout_needs_other_random_numbers_each_time():
    x = torch.ones(B, N, D)
    assert not torch.equal(landmarks(x, 29, dropout=0.5), landmarks(x, 29, dropout=0.5))


@pytest.mark.parametrize("length", [23, 97])
@pytest.mark.parametrize("jitter", [0.3, 0.6, 1.7])
@pytest.mark.parametrize("count", [2, 7, 31])
def test_jitter_stays_within_its_bounds(length, jitter, count):
    torch.manual_seed(0)
    batch = 200
    mask = token_masks(1, length)["holes"].expand(batch, length)
    real = mask[0].nonzero()[:, 0].tolist()
    n = len(real)
    rank_of = {position: rank for rank, position in enumerate(real)}
    got = positions(landmarks(numbered(length, batch), count, token_mask=mask, jitter=jitter))
    bound = round(jitter * (n - 1) / (count - 1))
    offsets = set()
    for row in got:
        for i, position in enumerate(row):
            assert position in rank_of, "a landmark left the real tokens"
            offset = rank_of[position] - i * (n - 1) // (count - 1)
            assert abs(offset) <= bound
            offsets.add(offset)
    if count > 2:  # of two, one cannot go left and the other cannot go right
        assert offsets == set(range(-bound, bound + 1)), "it never uses the whole range"
    if bound:
        assert len({tuple(row) for row in got}) > 1, "one draw for all sequences"


def test_jitter_is_uniform_over_the_spacing():
    torch.manual_seed(0)
    batch, length, count = 4000, 101, 11  # spacing 10, jitter 0.5: offsets -5 to 5
    got = torch.tensor(positions(landmarks(numbered(length, batch), count, jitter=0.5)))
    offset = (got - 10 * torch.arange(count))[:, 1:-1].flatten()  # away from the ends
    for value in range(-4, 5):
        share = (offset == value).double().mean().item()
        assert abs(share - 0.1) < 0.01, f"offset {value} has the share {share}"
    for value in (-5, 5):  # half an interval
        assert abs((offset == value).double().mean().item() - 0.05) < 0.01


def test_without_jitter_or_dropout_no_random_number_is_drawn():
    state = torch.get_rng_state()
    landmarks(randn(B, N, D), 7, token_mask=MASKS["holes"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"jitter": 2.5}, {"dropout": 0.4, "jitter": 0.6}])
@pytest.mark.parametrize("num_landmarks", [1, 7, 23, 61])
@pytest.mark.parametrize("mask", MASKS)
def test_positions_are_the_same_fused(mask, num_landmarks, options):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = numbered(N).to(device)
    token_mask = None if MASKS[mask] is None else MASKS[mask].to(device)
    found = []
    for when in ("always", "never"):
        torch.manual_seed(0)
        with fused_ops(when):
            found.append(choose_landmarks(x, num_landmarks, token_mask=token_mask, **options))
    assert torch.equal(found[0].positions, found[1].positions)
    assert found[0].scale == found[1].scale
