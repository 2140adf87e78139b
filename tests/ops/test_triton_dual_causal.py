import pytest
import torch

from primal_attention.ops import launch
from primal_attention.ops.dual_causal import chunked, dual_causal_attention, sizes
from primal_attention.ops.running_mean import token_counts

from .formulas import gradients, randn
from .fused import DEVICES, TOLERANCES, assert_near, poisoned_memory
from .padding import assert_laid_out, holes, in_float64, poisoned

fused = pytest.importorskip("primal_attention.ops.dual_causal.triton", exc_type=ImportError)

B, N, H, P, S, V = 2, 37, 1, 5, 3, 7
__all__ = ["poisoned_memory"]
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # interpreter
    pytest.mark.parametrize("device", DEVICES),
]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Blocks of 16 tokens, two segments of a sequence of three blocks."""
    monkeypatch.setattr(launch, "PROGRAMS", 2 * B * H)
    monkeypatch.setattr(launch, "SHORTEST", 1)
    for table in (sizes.FORWARD, sizes.BACKWARD, sizes.SUMS):
        for key in table:
            monkeypatch.setitem(table, key, launch.Config(16, 4, 1))


def inputs(device, dtype=torch.float32, *, length=N, dims=(P, S, V), sides="both", rest=True):
    p, s, v = dims
    q, k = randn(B, length, H, 2 * p).to(device, dtype).split(p, -1)
    h = randn(B, length, 2, H, s, seed=1).to(device, dtype)

    def small(*shape, seed):
        return randn(*shape, seed=seed).to(device, torch.float32)

    c_e, c_r = small(s, v, seed=2), small(s, v, seed=3)
    maps = None if sides == "r" else c_e, None if sides == "e" else c_r
    if not rest:
        return q, k, h, *maps, None, None, None
    before = small(B, H, p, s, seed=4), small(B, H, p, s, seed=5)
    return q, k, h, *maps, small(v, seed=6), *before


def options(tensors, mask=None, maps=("cosine", "cosine"), before=5.0):
    q = tensors[0]
    counts = token_counts(q, mask, torch.full((B,), before, device=q.device))
    return counts, mask, *maps


def cotangents(outputs, dtype):
    d_out, *rest = (randn(*x.shape, seed=7 + i).to(x.device) for i, x in enumerate(outputs))
    return [d_out.to(dtype), *(x.to(torch.float32) for x in rest)]


def poisoned_pairs(h, mask):
    return h if mask is None else torch.where(mask[:, :, None, None, None], h, float("nan"))


def assert_both_passes(tensors, mask=None, maps=("cosine", "cosine"), *, grams=True):
    q, k, h, *rest = tensors
    tolerance, given = 2 * TOLERANCES[q.dtype], options(tensors, mask, maps)
    bad = poisoned(q, mask), poisoned(k, mask), poisoned_pairs(h, mask), *rest
    *got, states = fused.forward(*bad, *given, grams, True)
    *want, exact_states = chunked.forward_in_pieces(*in_float64(*tensors), *given, grams, True)
    assert_near(got, want, tolerance, "forward")
    d_out, *d_rest = cotangents(want, q.dtype)
    d_rest = d_rest if grams else [*d_rest[:2], None, None]
    assert_near(
        fused.backward(*bad, *given, states, poisoned(d_out, mask), *d_rest),
        chunked.backward_in_pieces(
            *in_float64(*tensors), *given, exact_states, *in_float64(d_out, *d_rest)
        ),
        tolerance,
        "backward",
    )


@pytest.mark.parametrize(
    ("dtype", "sides"),
    [*((dtype, "both") for dtype in TOLERANCES), (torch.bfloat16, "e"), (torch.float32, "r")],
)
def test_outputs_sums_and_gradients(device, dtype, sides):
    assert_both_passes(inputs(device, dtype, sides=sides), holes(B, N, device))


@pytest.mark.parametrize("rest", [True, False], ids=["bias, sums and Gram", "none of them"])
def test_without_a_mask(device, rest):
    assert_both_passes(inputs(device, rest=rest), grams=rest)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("maps", [("cosine", "identity"), ("elu", "relu")])
def test_whole_blocks(device, maps, masked):
    """Of 48 tokens all are, in two segments."""
    mask = holes(B, 48, device) if masked else None
    assert_both_passes(inputs(device, length=48), mask, maps)


def test_which_walks_are_without_conditions(device):
    segments, config = launch.Segments(32, 2), launch.Config(16, 4, 1)
    assert fused.is_whole(48, segments, config, "cosine", "identity")
    assert not fused.is_whole(47, segments, config, "cosine", "identity")
    for made_in_registers in ("elu", "relu"):
        assert not fused.is_whole(48, segments, config, "cosine", made_in_registers)


@pytest.mark.parametrize("maps", [("elu", "relu"), ("relu", "identity"), ("identity", "elu")])
def test_every_map(device, maps):
    assert_both_passes(inputs(device), holes(B, N, device), maps)


@pytest.mark.parametrize(
    ("length", "dims"), [(1, (1, 1, 1)), (16, (16, 16, 16)), (17, (67, 3, 5)), (19, (5, 17, 67))]
)
def test_any_size(device, length, dims):
    tensors = inputs(device, torch.bfloat16, length=length, dims=dims)
    assert_both_passes(tensors, maps=("elu", "elu"))


@pytest.mark.parametrize("programs", [1, 100])
def test_any_number_of_segments(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    assert_both_passes(inputs(device))


def test_gradients_of_one_result_alone(device, only=1):
    tensors = inputs(device, length=17)
    given = options(tensors)
    *outputs, states = fused.forward(*tensors, *given, True, True)
    d = cotangents(outputs, torch.float32)
    d = [torch.zeros_like(d[0]), *(x if i == only else None for i, x in enumerate(d[1:], 1))]
    exact = in_float64(*tensors)
    exact_states = chunked.forward_in_pieces(*exact, *given, False, True)[-1]
    assert_near(
        fused.backward(*tensors, *given, states, *d),
        chunked.backward_in_pieces(*exact, *given, exact_states, *in_float64(*d)),
        1e-6,
    )


@pytest.mark.parametrize("programs", [1, 100])
def test_sums_of_the_gradients_of_the_tokens(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    tensors, mask = inputs(device), holes(B, N, device)
    given = options(tensors, mask)
    *outputs, states = fused.forward(*tensors, *given, True, True)
    d_tokens = tuple(torch.empty_like(x) for x in tensors[:3])
    total = tensors[0].new_empty(2 * H * (P + S))
    d = cotangents(outputs, torch.float32)
    fused.write_gradients(*tensors, *given, states, *d, d_tokens, total)
    sums = torch.cat([x.double().sum((0, 1)).flatten() for x in d_tokens])
    assert_near([total], [sums], 1e-6)


@pytest.mark.parametrize("programs", [1, 100])
def test_sums_after_the_last_token_may_be_means(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    tensors = inputs(device, rest=False)
    given, by_n = options(tensors), torch.tensor([0.5, 0.03], device=device)
    _, *sums, _, _, states = fused.forward(*tensors, *given, False, True)
    _, *means, _, _, _ = fused.forward(*tensors, *given, False, True, by_n)
    scale = by_n[:, None, None, None]
    assert_near(means, [x.double() * scale for x in sums], 1e-6)
    d_out, *d_sides = cotangents((tensors[0].new_empty(B, N, H, V), *sums), torch.float32)
    grads = [[torch.empty_like(x) for x in tensors[:3]] for _ in range(2)]
    rest = None, None, grads[0], None, by_n
    *_, dq_before, dk_before = fused.write_gradients(
        *tensors, *given, states, d_out, *d_sides, *rest
    )
    rest = *(d * scale for d in d_sides), None, None, grads[1], None
    fused.write_gradients(*tensors, *given, states, d_out, *rest)
    assert_near(grads[0], [x.double() for x in grads[1]], 1e-6)
    assert not dq_before.numel() + dk_before.numel()


def test_columns_need_not_be_adjacent(device):
    q, k, h, c_e, c_r, bias, *sums = inputs(device, length=17)
    q, k, h, c_e, *sums = (x.mT.contiguous().mT for x in (q, k, h, c_e, *sums))
    assert_both_passes((q, k, h, c_e, c_r, bias, *sums))


def test_in_two_parts_it_is_the_same(device):
    tensors = inputs(device)
    counts, *maps = options(tensors)
    out, q_side, k_side, *_ = fused.forward(*tensors, counts, *maps, False, False)

    def part(where, *sums):
        rows = (x[:, where] for x in tensors[:3])
        return fused.forward(*rows, *tensors[3:6], *sums, counts[:, where], *maps, False, False)

    first = part(slice(0, 21), *tensors[6:])
    second = part(slice(21, N), first[1], first[2])
    joined = [torch.cat([first[0], second[0]], 1), second[1], second[2]]
    assert_near(joined, in_float64(out, q_side, k_side), 1e-6)


@pytest.mark.parametrize(("sides", "grams"), [("both", True), ("e", False)])
def test_the_layout_is_the_one_that_is_announced(device, sides, grams, monkeypatch):
    monkeypatch.setattr(chunked, "is_fused", lambda *x: True)
    q, k, h, *rest = inputs(device, torch.bfloat16, length=17, sides=sides)
    tensors = q.mT.contiguous().mT, k, h.mT.contiguous().mT, *rest
    given = options(tensors)
    *outputs, states = fused.forward(*tensors, *given, grams, True)
    assert_laid_out([*outputs, states], chunked.empty_outputs(*tensors, *given, grams, True))
    d = outputs if grams else [*outputs[:3], None, None]
    gradients = fused.backward(*tensors, *given, states, *d)
    assert_laid_out(gradients, chunked._empty_gradients(*tensors))


def test_nothing_is_kept_where_it_is_not_wanted(device):
    tensors = inputs(device, length=17)
    given = *options(tensors), False, False
    assert_laid_out(fused.forward(*tensors, *given), chunked.empty_outputs(*tensors, *given))


def test_one_bfloat16_is_enough_for_what_is_multiplied(device):
    """The error is within twice that of plain bfloat16 arithmetic of the same formula."""
    tensors = inputs(device, torch.bfloat16, length=67, dims=(16, 16, 16))
    counts, *_ = given = options(tensors)
    exact = in_float64(*tensors)
    *want, exact_states = chunked.forward_in_pieces(*exact, *given, True, True)
    *got, states = fused.forward(*tensors, *given, True, True)
    d = cotangents(want, torch.bfloat16)
    want += chunked.backward_in_pieces(*exact, *given, exact_states, *in_float64(*d))
    got += fused.backward(*tensors, *given, states, *d)
    low = [x.to(torch.bfloat16) for x in tensors]
    plain = eager(*low, counts, *(x.to(torch.bfloat16) for x in d))
    for number, (one, other, true) in enumerate(zip(got, plain, want, strict=True)):
        found, allowed = (float((x.double() - true).norm()) for x in (one, other))
        assert found <= 2 * allowed, f"tensor {number}: {found:.2e} > 2 * {allowed:.2e}"


def eager(*arguments):
    """Values and gradients with every step in the dtype of the inputs."""
    *tensors, counts = arguments[:9]

    def run(q, k, h, c_e, c_r, bias, q_before, k_before):
        phi_q, phi_k = (torch.nn.functional.normalize(z, dim=-1) for z in (q, k))
        kernel_matrix = torch.einsum("bnhp,bmhp->bhnm", phi_q, phi_k)
        (h_e, h_r), n = h.unbind(2), counts.to(q.dtype)[:, :, None, None]
        e = torch.einsum("bhnm,bmhs->bnhs", kernel_matrix.tril(), h_r)
        r = torch.einsum("bhnm,bmhs->bnhs", kernel_matrix.mT.tril(), h_e)
        e = (e + torch.einsum("bnhp,bhps->bnhs", phi_q, k_before)) / n
        r = (r + torch.einsum("bnhp,bhps->bnhs", phi_k, q_before)) / n
        sums = (
            torch.einsum("bnhp,bnhs->bhps", phi, values)
            for phi, values in ((phi_q, h_e), (phi_k, h_r), (phi_q, phi_q), (phi_k, phi_k))
        )
        q_side, k_side, *grams = sums
        return e @ c_e + r @ c_r + bias, q_before + q_side, k_before + k_side, *grams

    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = run(*leaves)
    grads = torch.autograd.grad(outputs, leaves, arguments[9:])
    return [*(x.detach() for x in outputs), *grads]


def test_both_passes_walk_over_the_same_blocks(device):
    """The backward pass reads the sums that the forward pass keeps before each block."""
    assert sizes.FORWARD.keys() == sizes.BACKWARD.keys()
    for key, config in sizes.FORWARD.items():
        assert config.block == sizes.BACKWARD[key].block


def test_what_it_takes(device):
    def takes(p, s, v, dtype=torch.bfloat16, maps=("cosine", "cosine")):
        z = torch.zeros(1, 2, 1, p, dtype=dtype, device=device)
        h = torch.zeros(1, 2, 2, 1, s, dtype=dtype, device=device)
        return fused.takes(z, z, h, None, torch.zeros(s, v, device=device), *[None] * 5, *maps)

    assert takes(64, 32, 64)
    assert takes(1, 1, 1)
    assert takes(48, 24, 48, torch.float16) and takes(96, 32, 96)
    assert not takes(48, 24, 48) and not takes(40, 24, 40)  # products of which read anywhere
    for maps in (("relu", "relu"), ("cosine", "relu"), ("elu", "cosine"), ("identity", "elu")):
        assert not takes(64, 32, 64, maps=maps)  # the same
        assert takes(32, 32, 32, maps=maps) and takes(64, 32, 64, torch.float16, maps)
    for maps in (("elu", "elu"), ("identity", "cosine")):
        assert takes(64, 32, 64, maps=maps)
    assert takes(64, 32, 64, torch.float32)
    assert not takes(257, 16, 16)
    assert not takes(16, 16, 257)
    assert not takes(16, 16, 16, torch.float64)


def test_the_public_op_on_this_device(device):
    tensors = inputs(device)
    counts, *_ = options(tensors)

    def run(*x):
        return dual_causal_attention(*x, counts=counts.to(x[0].device))

    got, want = gradients(run, tensors), gradients(run, in_float64(*tensors))
    assert_near([*got[0], *got[1]], [*want[0], *want[1]], 1e-6)
