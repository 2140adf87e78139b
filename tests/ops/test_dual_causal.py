"""The causal op with dual weights: its reference, its form in pieces, what PyTorch sees of it."""

from functools import partial

import pytest
import torch

from primal_attention.ops.dual_causal import dual_causal_attention, pieces, reference
from primal_attention.ops.running_mean import token_counts

from .formulas import (
    MAPS,
    MASKS,
    B,
    C,
    H,
    N,
    S,
    assert_close,
    assert_identical,
    assert_same,
    gradients,
    randn,
    real,
    stacked,
)

V = 11
BEFORE = torch.tensor([3.0, 0.0], dtype=torch.float64)
SIDES = ["both", "e", "r"]
expanded = reference.dual_causal_attention


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """23 tokens are four whole pieces and a ragged one."""
    monkeypatch.setattr(pieces, "PIECE", 5)


def inputs(length=N, *, sides="both", bias=True, state=True, dtype=torch.float64):
    tensors = [
        2 * randn(B, length, H, C),
        2 * randn(B, length, H, C, seed=1),
        randn(B, length, 2, H, S, seed=2),
        None if sides == "r" else randn(S, V, seed=3),
        None if sides == "e" else randn(S, V, seed=4),
        randn(V, seed=5) if bias else None,
        randn(B, H, C, S, seed=6) if state else None,
        randn(B, H, C, S, seed=7) if state else None,
    ]
    return [None if x is None else x.to(dtype) for x in tensors]


def options(mask=None, length=N, **maps):
    counts = token_counts(torch.empty(B, length), mask, BEFORE)
    return {"counts": counts, "token_mask": mask, **maps}


def of(op, **given):
    return partial(op, **given)


def token_by_token(
    q, k, h, c_e, c_r, bias, q_before, k_before, *, counts, token_mask, map_q, map_k
):
    """The sums of both sides grow with every real token, which then reads that of the other."""
    (batch, length, heads, P), width = q.shape, (c_e if c_e is not None else c_r).shape[-1]
    zero = torch.zeros(P, h.shape[-1]).to(q)
    out = [[[zero.new_zeros(width)] * heads for _ in range(length)] for _ in range(batch)]
    after = [[[zero] * heads for _ in range(batch)] for _ in range(2)]
    grams = [[[zero.new_zeros(P, P)] * heads for _ in range(batch)] for _ in range(2)]
    for b in range(batch):
        for n in range(heads):
            sums = [zero if x is None else x[b, n] for x in (q_before, k_before)]
            total = [zero.new_zeros(P, P)] * 2
            for t in (t for t in range(length) if real(token_mask, b, t)):
                phi = MAPS[map_q](q[b, t, n]), MAPS[map_k](k[b, t, n])
                sums = [sums[i] + torch.outer(phi[i], h[b, t, i, n]) for i in range(2)]
                total = [total[i] + torch.outer(phi[i], phi[i]) for i in range(2)]
                scores = phi[0] @ sums[1], phi[1] @ sums[0]
                reads = [s @ c for s, c in zip(scores, (c_e, c_r), strict=True) if c is not None]
                out[b][t][n] = sum(reads) / counts[b, t] + (0 if bias is None else bias)
            for i in range(2):
                after[i][b][n], grams[i][b][n] = sums[i], total[i]
    return tuple(map(stacked, (out, *after, *grams)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sides", SIDES)
def test_the_reference_is_the_recurrence(sides, mask):
    given = options(MASKS[mask], map_q="elu", map_k="cosine")
    assert_same(of(expanded, **given), of(token_by_token, **given), inputs(sides=sides))


def test_the_reference_without_a_bias_and_a_state():
    given = options(map_q="elu", map_k="cosine")
    tensors = inputs(bias=False, state=False)
    assert_same(of(expanded, **given), of(token_by_token, **given), tensors)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("feature_map", MAPS)
def test_in_pieces_it_equals_the_reference(feature_map, sides, mask):
    given = options(MASKS[mask], map_q=feature_map, map_k="cosine")
    tensors = inputs(sides=sides, state=mask != "padded", bias=sides != "r")
    assert_same(of(dual_causal_attention, **given), of(expanded, **given), tensors)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 37])
@pytest.mark.parametrize("piece", [1, 5, 64])
def test_any_number_of_tokens_in_any_pieces(length, piece, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", piece)
    given = options(length=length)
    assert_same(of(dual_causal_attention, **given), of(expanded, **given), inputs(length))


@pytest.mark.parametrize("only", range(5))
def test_gradients_of_one_result_alone(only):
    given = options(MASKS["holes"])

    def chosen(op):
        return lambda *x: op(*x, **given)[only : only + 1]

    assert_same(chosen(dual_causal_attention), chosen(expanded), inputs())


def test_gram_matrices_only_where_they_are_wanted():
    with_grams = gradients(of(dual_causal_attention, **options()), inputs())[0]
    without = dual_causal_attention(*inputs(), **options(), grams=False)
    assert without.gram_q.numel() == without.gram_k.numel() == 0
    for got, want in zip(without[:3], with_grams[:3], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_the_sums_carry_on_where_a_pass_stopped(mask):
    given, tensors = options(MASKS[mask]), inputs()
    whole = dual_causal_attention(*tensors, **given)

    def part(where, q_side, k_side):
        q, k, h, *maps = tensors[:6]
        cut = {name: None if x is None else x[:, where] for name, x in given.items()}
        rows = (x[:, where] for x in (q, k, h))
        return dual_causal_attention(*rows, *maps, q_side, k_side, **cut)

    first = part(slice(0, 9), *tensors[6:])
    second = part(slice(9, N), first.q_side, first.k_side)
    assert_close(torch.cat([first.out, second.out], dim=1), whole.out)
    assert_close(first.gram_q + second.gram_q, whole.gram_q)
    assert_close(second.q_side, whole.q_side)
    assert_close(second.k_side, whole.k_side)


def test_the_given_sums_are_not_written_to():
    tensors = inputs()
    before = [x.clone() for x in tensors[6:]]
    dual_causal_attention(*tensors, **options())
    assert all(torch.equal(x, y) for x, y in zip(tensors[6:], before, strict=True))


def test_inputs_may_be_views():
    """Queries and keys as halves of one projection, maps and sums transposed."""
    q, k, h, c_e, c_r, *rest = inputs()
    both = torch.stack([q, k], dim=2)

    def through(op):
        def run(both, h, c_e, c_r, bias, *sums):
            sums = [x.mT.contiguous().mT for x in sums]
            q, k = both.unbind(2)
            h = h.transpose(-1, -2).contiguous().transpose(-1, -2)
            return op(q, k, h, c_e.T.contiguous().T, c_r.T.contiguous().T, bias, *sums, **options())

        return run

    given = [both, h, c_e, c_r, *rest]
    assert_same(through(dual_causal_attention), through(expanded), given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feature_map", MAPS)
def test_what_stands_at_masked_tokens_reaches_nothing(feature_map, bad):
    mask = MASKS["empty"]
    run = of(dual_causal_attention, **options(mask, map_q=feature_map, map_k=feature_map))
    q, k, h, *rest = inputs()
    poisoned = [torch.where(mask[..., None, None], z, bad) for z in (q, k)]
    poisoned.append(torch.where(mask[..., None, None, None], h, bad))
    assert_identical(gradients(run, [*poisoned, *rest]), gradients(run, [q, k, h, *rest]))


def test_outputs_are_zero_at_masked_tokens():
    out = dual_causal_attention(*inputs(), **options(MASKS["empty"])).out
    assert not out[~MASKS["empty"]].any()
    assert out[MASKS["empty"]].all()


def test_a_later_token_changes_no_earlier_output():
    q, k, h, *rest = inputs()
    want = dual_causal_attention(q, k, h, *rest, **options()).out[:, :11]
    for tensor in (q, k, h):
        tensor[:, 11:] = 1e3
    assert torch.equal(dual_causal_attention(q, k, h, *rest, **options()).out[:, :11], want)


def test_one_side_at_least_is_needed():
    q, k, h, *_ = inputs()
    with pytest.raises(ValueError, match=r"c_e and c_r are both None"):
        dual_causal_attention(q, k, h, None, None, None, None, None, **options())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_in_half_precision_is_at_most_twice_that_of_the_reference(dtype):
    given, rounded = options(MASKS["holes"]), inputs(dtype=dtype)
    exact = gradients(of(expanded, **given), [x.double() for x in rounded])
    eager, ours = (gradients(of(op, **given), rounded) for op in (expanded, dual_causal_attention))
    for part in (0, 1):  # values, gradients
        for got, other, want in zip(ours[part], eager[part], exact[part], strict=True):
            assert got.dtype == other.dtype
            allowed = 2 * float((other.double() - want).norm()) + 1e-6 * float(want.norm())
            assert float((got.double() - want).norm()) <= allowed


def test_sums_are_in_float32():
    """A half-precision sum of 5,000 equal numbers is off by more than a tenth."""
    z, c = torch.ones(1, 5000, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    counts = token_counts(z, None, None)
    result = dual_causal_attention(z, z, z[:, :, None].expand(-1, -1, 2, -1, -1), c, c, None, None,
                                   None, counts=counts)  # fmt: skip
    assert result.out.dtype == torch.bfloat16
    assert_close(result.out[:, -1].double(), torch.full((1, 1, 1), 2.0).double(), 1e-2)
    for total in result[1:]:
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(5000, rel=1e-5)


def test_autocast_does_not_lower_the_sums():
    def under_autocast(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dual_causal_attention(*tensors, **options())

    tensors = inputs(dtype=torch.float32)
    plain = of(dual_causal_attention, **options())
    assert_identical(gradients(under_autocast, tensors), gradients(plain, tensors))


@pytest.mark.parametrize("scale", [0.0, 1e-15, 1e15])
def test_queries_of_any_size_give_finite_values_and_gradients(scale):
    q, k, *rest = inputs(dtype=torch.float32)
    run = of(dual_causal_attention, **options())
    for part in gradients(run, [q * scale, k * scale, *rest]):
        assert all(tensor.isfinite().all() for tensor in part)


def leaves(sides="both"):
    return [None if x is None else x.requires_grad_() for x in inputs(sides=sides)]


@pytest.mark.parametrize("sides", SIDES)
def test_gradients_of_gradients(sides):
    given = options(MASKS["empty"], map_k="elu")
    wanted = [x for x in leaves(sides) if x is not None]

    def run(*tensors):
        rest = iter(tensors)
        filled = [None if x is None else next(rest) for x in inputs(sides=sides)]
        return tuple(dual_causal_attention(*filled, **given))

    assert torch.autograd.gradcheck(run, wanted, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, wanted, fast_mode=True)


def test_a_backward_pass_where_the_sums_were_not_kept():
    """The op itself, asked to keep nothing, as a caller without gradients would."""
    tensors, given = leaves(), options()
    forward = torch.ops.primal_attention.dual_causal_forward
    arguments = given["counts"], None, "cosine", "cosine", True
    grads = []
    for keep in (False, True):
        out, *_, states = forward(*tensors, *arguments, keep)
        assert bool(states.numel()) is keep
        grads.append(torch.autograd.grad(out.square().sum(), tensors))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("mask", ["none", "empty"])
@pytest.mark.parametrize("sides", SIDES)
def test_opcheck(sides, mask):
    tensors, ops = leaves(sides), torch.ops.primal_attention
    shared = options(MASKS[mask])["counts"], MASKS[mask], "cosine", "elu"
    for flags in ((True, True), (False, True), (False, False)):
        results = torch.library.opcheck(
            ops.dual_causal_forward.default, (*tensors, *shared, *flags)
        )
        assert set(results.values()) == {"SUCCESS"}, results
    plain = [None if x is None else x.detach() for x in tensors]
    *outputs, states = ops.dual_causal_forward(*plain, *shared, True, True)
    cotangents = [randn(*x.shape, seed=20 + i) for i, x in enumerate(outputs)]
    for given in (cotangents, [*cotangents[:1], None, None, None, None]):
        results = torch.library.opcheck(
            ops.dual_causal_backward.default, (*plain, *shared, states, *given)
        )
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("sides", SIDES)
def test_every_output_and_gradient_is_written(sides, monkeypatch):
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    given = options(MASKS["empty"])
    assert_same(of(dual_causal_attention, **given), of(expanded, **given), inputs(sides=sides))
