"""The custom ops as PyTorch sees them: registration, double backward, unwritten memory."""

import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.moment import moment
from primal_attention.ops.moment import reference as moment_reference
from primal_attention.ops.primal import gram, primal_attention
from primal_attention.ops.primal import reference as primal_reference
from primal_attention.ops.scan import chunked as scan_chunked
from primal_attention.ops.scan import reference as scan_reference
from primal_attention.ops.scan import scan

from .formulas import MAPS, assert_same, randn, token_masks

B, H, N, C, S, V = 2, 1, 19, 2, 3, 2
MASK = token_masks(B, N)["empty"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(scan_chunked, "_PIECE", 7)


def leaves(*shapes):
    return [(2 * randn(*shape, seed=i)).requires_grad_() for i, shape in enumerate(shapes)]


TOKENS, VALUES, WEIGHTS = (B, N, H, C), (B, N, H, S), (B, H, C, S)

CASES = {
    "primal": (primal_attention, [TOKENS, TOKENS, WEIGHTS, WEIGHTS, (S, C), (S, C), (C,)]),
    "primal static": (primal_attention, [TOKENS, TOKENS, (H, C, S), (H, C, S), (S, C), (S, C)]),
    "primal e": (
        lambda q, k, w_e, w_r, c_e: primal_attention(q, k, w_e, w_r, c_e, None),
        [TOKENS, TOKENS, WEIGHTS, WEIGHTS, (S, C)],
    ),
    "gram": (gram, [TOKENS]),
    "moment": (moment, [TOKENS, VALUES]),
    "scan": (scan, [TOKENS, TOKENS, VALUES, (S, V), (B, H, C, V)]),
    "scan plain": (scan, [TOKENS, TOKENS, VALUES]),
}


def run(name, feature_map):
    op = CASES[name][0]
    maps = {"feature_map": feature_map}
    if "primal" in name or "scan" in name:
        maps = {"map_q": feature_map, "map_k": feature_map}
    if name == "primal e":
        return lambda *x: primal_attention(*x, None, token_mask=MASK, **maps)
    return lambda *x: op(*x, token_mask=MASK, **maps)


@pytest.mark.parametrize("feature_map", ["cosine", "elu"])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name, feature_map):
    assert torch.autograd.gradcheck(run(name, feature_map), leaves(*CASES[name][1]), fast_mode=True)


@pytest.mark.parametrize("feature_map", ["cosine", "elu"])
@pytest.mark.parametrize("name", CASES)
def test_gradgradcheck(name, feature_map):
    assert torch.autograd.gradgradcheck(
        run(name, feature_map), leaves(*CASES[name][1]), fast_mode=True
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients_with_and_without_a_graph_agree(name):
    def of(create_graph):
        def function(*inputs):
            inputs = [x.detach().requires_grad_() for x in inputs]
            outputs = run(name, "cosine")(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            total = sum(output.square().sum() for output in outputs)
            return torch.autograd.grad(
                total, inputs, create_graph=create_graph, materialize_grads=True
            )

        return function

    inputs = leaves(*CASES[name][1])
    for one, other in zip(of(True)(*inputs), of(False)(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", range(7))
def test_inputs_that_need_no_gradient(frozen):
    """Each alone, in the first and the second backward pass."""
    inputs = leaves(*CASES["primal"][1])
    inputs[frozen].requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    out = primal_attention(*inputs, token_mask=MASK).out.square().sum()
    grads = torch.autograd.grad(out, wanted, create_graph=True)
    plain = torch.autograd.grad(
        primal_reference.primal_attention(*inputs, token_mask=MASK).out.square().sum(), wanted
    )
    for got, want in zip(grads, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), wanted, allow_unused=True)
    assert any(grad is not None and grad.any() for grad in second)


def opcheck(name, arguments):
    op = getattr(torch.ops.primal_attention, name).default
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("sides", ["both", "e", "r", "gram"])
def test_opcheck_of_primal(sides, mask):
    q, k, a_e, a_r, bias = leaves(TOKENS, TOKENS, (B, H, C, V), (B, H, C, V), (V,))
    a_e, a_r = (a_e if sides in ("both", "e") else None), (a_r if sides in ("both", "r") else None)
    if sides == "gram":
        k = bias = None
    grams = (True, sides == "both")
    opcheck("primal_forward", (q, k, a_e, a_r, bias, mask, "cosine", "elu", *grams))
    d_out = None if sides == "gram" else randn(B, N, H, V)
    grads = (d_out, randn(B, H, C, C), randn(B, H, C, C) if grams[1] else None)
    tensors = [None if x is None else x.detach() for x in (q, k, a_e, a_r, bias)]
    opcheck("primal_backward", (*tensors, mask, "cosine", "elu", *grads))


@pytest.mark.parametrize("mask", [None, MASK])
def test_opcheck_of_moment(mask):
    z, values = leaves(TOKENS, VALUES)
    opcheck("moment_forward", (z, values, mask, "cosine"))
    opcheck("moment_backward", (z.detach(), values.detach(), mask, "cosine", randn(*WEIGHTS)))


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("view", [False, True], ids=["contiguous", "transposed"])
def test_opcheck_of_scan(mask, view):
    q, k, values, value_map, state = leaves(*CASES["scan"][1])
    d_state = randn(B, H, C, V)
    if view:
        state, d_state = (x.detach().mT.contiguous().mT for x in (state, d_state))
        state.requires_grad_()
    opcheck("scan_forward", (q, k, values, value_map, state, mask, "cosine", "elu"))
    opcheck("scan_forward", (q, k, values, None, None, mask, "cosine", "elu"))
    tensors = [x.detach() for x in (q, k, values, value_map, state)]
    arguments = (*tensors, mask, "cosine", "elu", randn(B, N, H, V), d_state)
    opcheck("scan_backward", arguments)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that whatever an op leaves unwritten is seen."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    assert torch.ones(2).new_empty(3).isnan().all()


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_and_gradient_is_written(feature_map, mask):
    maps = {"token_mask": mask, "map_q": feature_map, "map_k": feature_map}
    single = {"token_mask": mask, "feature_map": feature_map}
    for name, op, reference in (
        ("primal", primal_attention, primal_reference.primal_attention),
        ("primal static", primal_attention, primal_reference.primal_attention),
        ("scan", scan, scan_reference.scan),
        ("scan plain", scan, scan_reference.scan),
    ):
        inputs = leaves(*CASES[name][1])
        assert_same(lambda *x, op=op: op(*x, **maps), lambda *x, r=reference: r(*x, **maps), inputs)
    assert_same(
        lambda *x: (moment(*x, **single),),
        lambda *x: (moment_reference.moment(*x, **single),),
        leaves(*CASES["moment"][1]),
    )
    assert gram(randn(*TOKENS), **single).isfinite().all()
