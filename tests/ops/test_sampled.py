import pytest
import torch

from primal_attention.ops.landmarks import choose_landmarks
from primal_attention.ops.sampled import reference, sampled_weights

from .formulas import assert_close, assert_identical, assert_same, gradients, randn, token_masks

B, N, H, P, S, C, M = 3, 23, 2, 5, 7, 11, 13
MASKS = token_masks(B, N)


def dense(x, index, w_e, w_r, c_e, c_r, scale):
    """W_e = sum_m scale x'_m w_{e,m}^T of each head, and A_e = W_e C_e, one landmark at a time."""
    results = []
    for w in (w_e, w_r):
        total = [[torch.zeros(P, S).to(x) for _ in range(H)] for _ in range(len(x))]
        for b in range(len(x)):
            for h in range(H):
                for m, token in enumerate(index[b].tolist()):
                    if token >= 0:
                        row = x[b, token, h * P : (h + 1) * P]
                        total[b][h] = total[b][h] + scale * torch.outer(row, w[h, m])
        results.append(torch.stack([torch.stack(heads) for heads in total]))
    return *results, *(w @ c for w, c in zip(results, (c_e, c_r), strict=True) if c is not None)


def matrices(num_landmarks=M, *, scores="both"):
    w = [randn(H, num_landmarks, S, seed=i) for i in (1, 2)]
    c_e, c_r = (part.mT for part in randn(C, 2 * S, seed=3).chunk(2, 1))
    return *w, c_e if scores != "r" else None, c_r if scores != "e" else None


def scattered(num_landmarks=M):
    """Landmarks in no order, some of them twice and some missing; one sequence has none."""
    index = torch.randint(-1, N, (B, num_landmarks), generator=torch.Generator().manual_seed(4))
    index[:, : num_landmarks // 3] = index[:, :1].clamp(min=0)
    index[1] = -1
    return index


def run(op, index, scale=1.0):
    def function(x, *others):
        return [each for each in op(x, index, *others, scale) if each is not None]

    return function


@pytest.mark.parametrize("scores", ["both", "e", "r"])
def test_the_reference_is_the_formula(scores):
    inputs = [randn(B, N, H * P), *matrices(scores=scores)]
    index = scattered()
    assert_same(run(reference.sampled_weights, index, 1.25), run(dense, index, 1.25), inputs)


@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("count", [M, 61])
def test_composed_it_equals_the_reference(scores, scale, count):
    inputs = [randn(B, N, H * P), *matrices(count, scores=scores)]
    index = scattered(count)
    assert_same(
        run(sampled_weights, index, scale), run(reference.sampled_weights, index, scale), inputs
    )


@pytest.mark.parametrize("count", [1, 2, 23, 61])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"jitter": 1.7}, {"dropout": 0.4}])
def test_of_landmarks(count, mask, options):
    torch.manual_seed(0)
    x = randn(B, N, H * P)
    _, index, scale = choose_landmarks(x, count, token_mask=MASKS[mask], **options)
    inputs = [x, *matrices(count)]
    assert_same(run(sampled_weights, index, scale), run(dense, index, scale), inputs)


def test_outputs_of_which_not_all_are_used():
    """Each alone: the other gradients are missing in the backward pass."""
    inputs = [randn(B, N, H * P), *matrices()]
    index = scattered()
    for only in range(4):
        assert_same(
            lambda *x, only=only: run(sampled_weights, index)(*x)[only : only + 1],
            lambda *x, only=only: run(reference.sampled_weights, index)(*x)[only : only + 1],
            inputs,
        )


def test_a_batch_without_sequences():
    inputs = [randn(0, N, H * P), *matrices()]
    index = torch.zeros(0, M, dtype=torch.long)
    outputs, grads = gradients(run(sampled_weights, index), inputs)
    assert [tuple(each.shape) for each in outputs] == [(0, H, P, S)] * 2 + [(0, H, P, C)] * 2
    for grad in grads[1:]:
        assert not grad.any()


def test_tokens_and_parameters_may_be_views():
    x, w_e, w_r, c_e, c_r = randn(B, N, H * P), *matrices()
    views = [x.mT.contiguous().mT, w_e.mT.contiguous().mT, w_r.mT.contiguous().mT]
    views += [c_e.contiguous(), c_r.expand(2, S, C)[1]]
    index = scattered()
    got = gradients(run(sampled_weights, index), views)
    want = gradients(run(dense, index), [x, w_e, w_r, c_e, c_r])
    for one, other in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [M, 61])
@pytest.mark.parametrize("op", [sampled_weights, reference.sampled_weights])
def test_what_is_no_landmark_reaches_nothing(op, count, bad):
    x, index = randn(B, N, H * P), scattered(count)
    taken = torch.zeros(B, N, dtype=torch.bool)
    for b in range(B):
        taken[b, index[b][index[b] >= 0]] = True
    assert not taken[:, 0].all(), "no bad token stands where a missing landmark would be looked up"
    poisoned = torch.where(taken[..., None], x, bad)
    clean = gradients(run(op, index), [x, *matrices(count)])
    assert_identical(gradients(run(op, index), [poisoned, *matrices(count)]), clean)
    assert not clean[1][0][~taken].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [M, 61])
def test_dtypes(dtype, count):
    """Outputs are float32 whatever comes in; gradients have the dtype of their input."""
    inputs = [each.to(dtype) for each in (randn(B, N, H * P), *matrices(count))]
    index = scattered(count)
    outputs, grads = gradients(run(sampled_weights, index), inputs)
    exact = gradients(run(reference.sampled_weights, index), [x.double() for x in inputs])
    for output, expected in zip(outputs, exact[0], strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert [grad.dtype for grad in grads] == [dtype] * 5
    for grad, expected in zip(grads, exact[1], strict=True):
        assert (grad - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()


def leaves():
    return [each.requires_grad_() for each in (randn(B, N, H * P), *matrices())]


def test_gradcheck():
    index = scattered()
    function = run(sampled_weights, index, 1.25)
    assert torch.autograd.gradcheck(lambda *x: tuple(function(*x)), leaves(), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: tuple(function(*x)), leaves(), fast_mode=True)


@pytest.mark.parametrize("scores", ["both", "e", "r"])
def test_opcheck(scores):
    x, index, (w_e, w_r, c_e, c_r) = randn(B, N, H * P), scattered(), matrices(scores=scores)
    inputs = [None if t is None else t.requires_grad_() for t in (x, w_e, w_r, c_e, c_r)]
    ops, arguments = torch.ops.primal_attention, (inputs[0], index, *inputs[1:], 1.25)
    results = torch.library.opcheck(ops.sampled_forward.default, arguments)
    assert set(results.values()) == {"SUCCESS"}, results
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    weights, a = randn(B, H, P, S), randn(B, H, P, C)
    d_sides = weights, None, None if c_e is None else a, None if c_r is None else a
    results = torch.library.opcheck(
        ops.sampled_backward.default, (*plain, weights, weights.clone(), *d_sides)
    )
    assert set(results.values()) == {"SUCCESS"}, results


def test_opcheck_of_the_index():
    arguments = randn(B, N, 3), MASKS["empty"], torch.rand(B, M), torch.rand(B, M), M, 0.7, 0.2
    op = torch.ops.primal_attention.landmark_index.default
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}, results
