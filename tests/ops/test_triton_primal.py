from itertools import product
from threading import Thread

import pytest
import torch

from primal_attention.ops.primal import primal_attention
from primal_attention.ops.primal.chunked import backward_in_pieces, forward_in_pieces

from .formulas import MAPS, randn, token_masks
from .fused import (
    DEVICES,
    assert_bits,
    assert_fits,
    assert_near,
    built_for_hopper,
    error,
    in_double,
    poisoned_memory,
)
from .primal_case import MARKS, SPLIT, B, C, Case, H, N, P, check, device, fused

from primal_attention.ops.triton_launch import (  # isort: skip - needs triton
    Descriptor,
    described,
    loads_blocks,
    spread_shares,
)

MASKS = token_masks(B, N)
__all__ = ["device", "poisoned_memory"]
pytestmark = MARKS


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("none", torch.bfloat16),
        ("padded", torch.float16),
        ("holes", torch.float32),
        ("empty", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("feature_map", MAPS)
def test_values_and_gradients(device, feature_map, mask, dtype):
    check(Case(device, dtype, mask=MASKS[mask], maps=(feature_map, feature_map)), dtype)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (16, torch.float32),
        (33, torch.float16),
        (64, torch.bfloat16),
        (65, torch.float32),
        (130, torch.float16),
        (256, torch.bfloat16),
    ],
)
def test_head_dims(device, width, dtype):
    options = {"width": width, "columns": width, "mask": MASKS["holes"]}
    check(Case(device, dtype, maps=("cosine", "elu"), **options), dtype)


@pytest.mark.parametrize(("width", "columns"), [(5, 40), (40, 5), (70, 5)])
def test_outputs_wider_and_narrower_than_the_head(device, width, columns):
    check(Case(device, width=width, columns=columns, mask=MASKS["holes"]))


@pytest.mark.parametrize("kinds", list(product(("batched", "shared"), repeat=2)))
@pytest.mark.parametrize("config", [None, SPLIT])
def test_batched_and_shared_projections(device, kinds, config):
    check(Case(device, kinds=kinds, mask=MASKS["empty"], length=N), config=config)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("maps", [("cosine", "relu"), ("elu", "identity")])
@pytest.mark.parametrize("length", [5, 16, 17, 48, 49])
def test_any_number_of_tokens(device, length, maps, mask):
    """Whole blocks alone too: of 16 tokens in one share, of 48 in several."""
    case = Case(device, length=length, mask=token_masks(B, length)[mask], maps=maps)
    check(case, config=SPLIT)


@pytest.mark.parametrize(("length", "splits"), [(107, 3), (128, 3), (65, 4)])
def test_shares_that_differ_by_a_block(device, length, splits):
    case = Case(device, length=length)
    config = SPLIT._replace(programs=splits * B * H)
    assert spread_shares(case.tensors["q"], config).splits == splits
    check(case, config=config)


def test_one_token(device):
    check(Case(device, length=1), config=SPLIT)


SIDES = [
    ("k", "a_r", "d_gram_k"),
    ("a_e",),
    ("a_r",),
    ("a_e", "a_r", "bias", "d_out"),
    ("bias",),
    (),
]
GRADIENTS = [("d_out",), ("d_gram_q",), ("d_gram_k",), ("d_out", "d_gram_q")]


@pytest.mark.parametrize(
    ("sides", "given", "width"),
    [
        *((sides, (), P) for sides in SIDES),
        *(((), given, P) for given in GRADIENTS),
        (SIDES[0], ("d_gram_q",), 70),
        (SIDES[3], (), 70),
        (SIDES[1], ("d_out",), 70),
    ],
)
def test_missing_inputs_and_missing_gradients(device, sides, given, width):
    case = Case(device, width=width, without=(*sides, *given), mask=MASKS["holes"])
    case.grams = (case.cotangents["d_gram_q"] is not None, case.cotangents["d_gram_k"] is not None)
    check(case)


@pytest.mark.parametrize(
    ("feature_map", "bad", "width"),
    [*((name, float("nan"), P) for name in MAPS), ("cosine", float("inf"), 70)],
)
def test_what_stands_at_masked_tokens_reaches_nothing(device, feature_map, bad, width):
    mask = MASKS["empty"].to(device)
    clean, poisoned = (
        Case(device, width=width, mask=mask, maps=(feature_map, feature_map)) for _ in range(2)
    )
    for group, name in (
        (poisoned.tensors, "q"),
        (poisoned.tensors, "k"),
        (poisoned.cotangents, "d_out"),
    ):
        group[name] = torch.where(mask[..., None, None], group[name], bad)
    assert_bits(fused.forward(*poisoned.forward()), fused.forward(*clean.forward()))
    assert_bits(fused.backward(*poisoned.backward()), fused.backward(*clean.backward()))
    for tensor in (
        fused.forward(*poisoned.forward())[0],
        *fused.backward(*poisoned.backward())[:2],
    ):
        assert not tensor[~mask].any()


def test_views_are_read_where_they_lie(device):
    case = Case(device, mask=MASKS["holes"])
    given = case.tensors
    packed = torch.stack([given["q"], given["k"]], 2)
    given["q"], given["k"] = packed.unbind(2)
    given["a_e"] = given["a_e"].mT.contiguous().mT
    case.cotangents["d_out"] = case.cotangents["d_out"][:, :1].expand(B, N, H, C)
    case.cotangents["d_gram_q"] = case.cotangents["d_gram_q"].mT
    assert not given["q"].is_contiguous()
    check(case)


def among_others(x, *places):
    """The tensor as a part of a larger one, all else in which is not a number."""
    sizes = [size + before + after for size, (before, after) in zip(x.shape, places, strict=True)]
    part = x.new_full(sizes, float("nan"))
    for axis, (before, _) in enumerate(places):
        part = part.narrow(axis, before, x.shape[axis])
    return part.copy_(x)


LAYOUTS = {  # and whether descriptors can say so
    "plain": (lambda x: x.clone(), True),
    "heads among others": (lambda x: among_others(x, (0, 0), (0, 0), (1, 4), (0, 0)), True),
    "tokens among others": (lambda x: among_others(x, (1, 1), (3, 8), (0, 0), (0, 0)), True),
    "columns among others": (lambda x: among_others(x, (0, 0), (0, 0), (0, 0), (8, 0)), True),
    "rows off by a few bytes": (lambda x: among_others(x, (0, 0), (0, 0), (0, 0), (4, 4)), False),
    "heads of odd length": (lambda x: among_others(x, (0, 0), (0, 0), (0, 0), (0, 3)), False),
    "heads apart": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    "the same tokens": (lambda x: x[:, :1].expand(x.shape), False),
}


@pytest.mark.parametrize("without", [(), ("k", "a_r", "d_gram_k")], ids=["both", "queries"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_blocks_wherever_they_lie(device, layout, without):
    moved, can = LAYOUTS[layout]
    case = Case(device, torch.bfloat16, length=128, width=64, columns=64, without=without)
    case.grams = (True, not without)
    for group, name in ((case.tensors, "q"), (case.tensors, "k"), (case.cotangents, "d_out")):
        group[name] = None if group[name] is None else moved(group[name])
    rows = described(case.tensors["q"], 64)
    assert isinstance(rows, Descriptor) == (can and loads_blocks(case.tensors["q"].device))
    check(case, torch.bfloat16)


def test_gradients_may_take_the_place_of_whole_blocks(device):
    case = Case(device, torch.bfloat16, length=128, width=64, columns=64)
    apart = fused.backward(*case.backward())
    grads = [case.tensors["q"], case.tensors["k"], *(torch.empty_like(x) for x in apart[2:])]
    q, k, a_e, a_r, _, *rest = case.backward()
    fused.write_gradients(q, k, a_e, a_r, *rest, grads)
    assert_bits(grads, apart)


@pytest.mark.parametrize("width", [P, 70])
def test_columns_that_are_not_adjacent(device, width):
    case = Case(device, width=width, mask=MASKS["holes"])
    case.tensors["q"] = case.tensors["q"].transpose(1, 3).contiguous().transpose(1, 3)
    case.tensors["k"] = case.tensors["k"].transpose(1, 2).contiguous().transpose(1, 2)
    case.cotangents["d_out"] = case.cotangents["d_out"].transpose(2, 3).contiguous().transpose(2, 3)
    check(case)
    dq, dk, *_ = fused.backward(*case.backward())
    assert (dq.stride(), dk.stride()) == (case.tensors["q"].stride(), case.tensors["k"].stride())


def test_zero_tiny_and_long_queries(device):
    case = Case(device)
    q = case.tensors["q"]
    q[0, 3], q[0, 4], q[1, 5] = 0, q[0, 4] * 1e-18, q[1, 5] * 1e15
    check(case)
    assert not fused.backward(*case.backward())[0][0, 3].any()


@pytest.mark.parametrize(("size", "length"), [(1e-7, 1e-3), (1e6, 1e2)])
def test_float16_holds_matrices_beyond_its_range(device, size, length):
    case = Case(device, torch.float16, without=("k", "a_e", "a_r", "bias", "d_out", "d_gram_k"))
    case.grams = (True, False)
    case.tensors["q"] *= length
    case.cotangents["d_gram_q"] *= size
    check(case, torch.float16)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the first product of a thread
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_errors_are_those_of_plain_arithmetic(device, dtype):
    """At most twice those of the collapsed form written out in the same dtype."""
    case = Case(device, dtype, width=32, columns=32, kinds=("batched", "batched"), length=67)
    q, k, a_e, a_r, bias = (x.to(dtype, copy=True) for x in case.tensors.values())
    for x in (q, k, a_e, a_r, bias):
        x.requires_grad_()
    case.tensors.update(a_e=a_e.detach().float(), a_r=a_r.detach().float())

    def phi(z):
        return z / z.norm(dim=-1, keepdim=True)

    phi_q, phi_k = phi(q).transpose(1, 2), phi(k).transpose(1, 2)
    out = (phi_q @ a_e + phi_k @ a_r + bias).transpose(1, 2)
    plain = [out, phi_q.mT @ phi_q, phi_k.mT @ phi_k]
    values = [x.detach() for x in plain]
    for actual, eager, exact in zip(
        fused.forward(*case.forward()),
        values,
        in_double(forward_in_pieces, case.forward()),
        strict=True,
    ):
        assert error(actual, exact) <= 2 * error(eager, exact)
    cotangents = [x.to(dtype) for x in case.cotangents.values()]
    case.cotangents = dict(zip(case.cotangents, [x.float() for x in cotangents], strict=True))
    case.cotangents["d_out"] = cotangents[0]
    plain = torch.autograd.grad(plain, (q, k, a_e, a_r, bias), cotangents)
    wanted = in_double(backward_in_pieces, case.backward())
    for actual, eager, exact in zip(fused.backward(*case.backward()), plain, wanted, strict=True):
        assert error(actual, exact) <= 2 * error(eager, exact)


def test_the_same_inputs_give_the_same_bits(device):
    case = Case(device, length=49, kinds=("shared", "shared"))
    for function, arguments in ((fused.forward, case.forward()), (fused.backward, case.backward())):
        assert_bits(function(*arguments, SPLIT), function(*arguments, SPLIT))


def test_what_the_fused_ops_do_not_take(device):
    def takes(dtype=torch.float32, **options):
        return fused.takes(*Case(device, dtype, **options).forward())

    assert takes()
    assert takes(torch.bfloat16, width=256, columns=256)
    assert not takes(torch.float64)
    assert not takes(width=257)
    assert not takes(columns=257)
    assert not takes(length=0)


@pytest.mark.slow
def test_they_fit_a_hopper_gpu():
    cases = [
        "primal:64:bfloat16:0",
        "primal:64:bfloat16:1",
        "primal:64:float16:1",
        "primal:64:float32:1",
        "primal:128:bfloat16:0",
        "primal:256:bfloat16:1",
    ]
    spilled = {"primal:64:float32:1": 64, "primal:256:bfloat16:1": 8}
    for build in built_for_hopper("hopper_primal.py", *cases):
        assert_fits(build, spilled=spilled.get(build.case, 0))
        whole = build.case == cases[0] and build.name in ("forward_blocks", "backward_blocks")
        assert (build.described > 0) == whole, build


@pytest.mark.parametrize("device", DEVICES[1:])  # it takes gigabytes, and hours interpreted
def test_tensors_beyond_two_to_the_31_elements(device):
    length, last = 2_200_003, slice(-50, None)
    q = torch.zeros(1, length, 1024, dtype=torch.bfloat16, device=device)[..., -64:].unsqueeze(2)
    q[:, last] = randn(1, 50, 1, 64).to(q)
    a = randn(1, 64, 64).float().to(device)
    out, gram, _ = fused.forward(q, None, a, None, None, None, "cosine", "", True, False)
    (short, short_gram, _) = fused.forward(
        q[:, last].clone(), None, a, None, None, None, "cosine", "", True, False
    )
    assert error(out[:, last], short.double()) < 1e-2
    assert error(gram, short_gram.double()) < 1e-2
    assert not out[:, :-50].any()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_graph_reads_whole_blocks_anew(device):
    case = Case(device, torch.bfloat16, length=128, width=64, columns=64)

    def run():
        return *fused.forward(*case.forward()), *fused.backward(*case.backward())

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for name in ("q", "k"):
        case.tensors[name].mul_(-3)
    graph.replay()
    assert_bits(results, run())


@pytest.mark.parametrize("device", DEVICES[1:])
def test_whole_blocks_in_a_thread_new_to_the_gpu(device, monkeypatch):
    monkeypatch.undo()  # to fill memory would be something else to do there first
    case = Case(device, torch.bfloat16, length=128, width=64, columns=64)
    for pass_, arguments in ((fused.forward, case.forward()), (fused.backward, case.backward())):
        wanted, results = pass_(*arguments), []
        thread = Thread(target=lambda: results.extend(pass_(*arguments)))  # noqa: B023 - runs here
        thread.start()
        thread.join()
        assert_bits(results, wanted)


@pytest.mark.parametrize("device", DEVICES[1:])  # the op has no fused form on a CPU
def test_the_op_runs_fused_on_a_gpu(device, monkeypatch):
    """Through autograd, and only there: float64 stays in pieces."""
    calls = []
    for name in ("forward", "backward"):
        run = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *x, run=run, name=name: calls.append(name) or run(*x)
        )
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        q, k, *weights = (
            randn(*shape, seed=i).to(device, dtype).requires_grad_()
            for i, shape in enumerate(
                [(B, N, H, P)] * 2 + [(B, H, P, 3)] * 2 + [(3, C)] * 2 + [(C,)]
            )
        )
        result = primal_attention(q, k, *weights, token_mask=MASKS["holes"].to(device))
        sum(x.square().sum() for x in result).backward()
        gradients[dtype] = [x.grad for x in (q, k, *weights)]
    assert calls == ["forward", "backward"]
    assert_near(gradients[torch.float32], gradients[torch.float64], 1e-5)
