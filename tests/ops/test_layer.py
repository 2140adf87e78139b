"""The layer as one fused op against the layer in plain PyTorch: values and all gradients."""

import pytest
import torch

from primal_attention.ops.landmarks.eager import IndexInputs, landmark_index
from primal_attention.ops.layer import LayerInputs, fused_layer, layer
from primal_attention.ops.op import fused_ops

from .formulas import randn, token_masks
from .fused import DEVICES, MAPS, TOLERANCES, assert_bits, assert_near, poisoned_memory

B, N, H, P, S, C, M = 3, 37, 2, 5, 7, 11, 13
MASKS = token_masks(B, N)
TENSORS = (
    *("x", "q_weight", "k_weight", "h_weight", "q_bias", "k_bias", "h_bias", "w_e", "w_r"),
    *("score_weight", "score_bias", "out_weight", "out_bias", "raw_lambda"),
)
SHIFTS = "q_bias", "k_bias", "h_bias"
KINDS = {
    "static": ("static", False),
    "sampled": ("sampled", False),
    "dual": ("dual", False),
    "static causal": ("static", True),
    "dual causal": ("dual", True),
}
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def case(device, kind, dtype=torch.float32, *, without=(), mask=None, **options):
    """Inputs of one call."""
    weights, causal = KINDS[kind]
    sizes = {"B": B, "N": N, "H": H, "P": P, "S": S, "C": C, "M": M} | options
    batch, length, heads, width, s, c, count = (sizes[name] for name in "BNHPSCM")
    sampled, dual = weights == "sampled", weights == "dual"
    dim = options.get("D", heads * width)
    rows, sides = count if sampled else width, 2 if options.get("scores", "both") == "both" else 1
    shapes = {
        **dict.fromkeys(("q_weight", "k_weight"), (heads * width, dim)),
        **dict.fromkeys(("q_bias", "k_bias"), (heads * width,)),
        "h_weight": (2 * heads * s, dim) if dual else None,
        "h_bias": (2 * heads * s,) if dual else None,
        **dict.fromkeys(("w_e", "w_r"), None if dual else (heads, rows, s)),
        "score_weight": (c, sides * s),
        "score_bias": (c,),
        "out_weight": (dim, heads * c),
        "out_bias": (dim,),
        "raw_lambda": (heads, s),
    }
    given = {
        name: None if shape is None or name in without else randn(*shape, seed=seed).float()
        for seed, (name, shape) in enumerate(shapes.items(), 1)
    }
    given["x"] = randn(batch, length, dim).to(dtype)
    positions = None
    if sampled:
        positions = chosen(batch, length, count, mask, options.get("jitter")).to(device)
    maps = options.get("maps", ("cosine", "cosine"))
    return LayerInputs(
        **{name: None if t is None else t.to(device) for name, t in given.items()},
        positions=positions,
        scale=1.25 if sampled else 1.0,
        num_heads=heads,
        causal=causal,
        token_mask=None if mask is None else mask.to(device),
        scores=options.get("scores", "both"),
        map_q=maps[0],
        map_k=maps[1],
        grams=options.get("grams", True),
    )


def chosen(batch, length, count, mask, jitter):
    generator = torch.Generator().manual_seed(4)
    moves, drops = (torch.rand(batch, count, generator=generator) for _ in range(2))
    if jitter is not None:
        x = torch.zeros(batch, length, 1)
        return landmark_index(IndexInputs(x, mask, moves, drops, count, jitter, 0.2))
    index = (moves * length).long()  # in no order
    return torch.where(drops < 0.1, -1, index)


def values_and_gradients(run, inputs, *, skipped=(), wanted=TENSORS):
    """Outputs and gradients by cotangents of those that are not skipped."""
    leaves = {name: getattr(inputs, name) for name in TENSORS}
    leaves = {
        name: None if t is None else t.detach().requires_grad_(name in wanted)
        for name, t in leaves.items()
    }
    result = run(inputs._replace(**leaves))
    assert result is not None
    outputs = {name: t for name, t in result._asdict().items() if name not in skipped and t.numel()}
    cotangents = [
        randn(*t.shape, seed=20 + number).to(t) for number, t in enumerate(outputs.values())
    ]
    given = [t for t in leaves.values() if t is not None and t.requires_grad]
    pairs = [(t, d) for t, d in zip(outputs.values(), cotangents, strict=True) if t.requires_grad]
    grads = torch.autograd.grad(
        [t for t, _ in pairs],
        given,
        [d for _, d in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return [t.detach() for t in result], list(grads)


def in_double(inputs):
    wide = {
        name: t if t is None else t.double()
        for name, t in ((name, getattr(inputs, name)) for name in TENSORS)
    }
    return inputs._replace(**wide)


def by_fused(inputs, **options):
    with fused_ops("always"):
        return values_and_gradients(fused_layer, inputs, **options)


def check(inputs, *, skipped=()):
    """Values and all gradients against float64.

    The output projection rounds its operands in both passes: a third of the roundings there are.
    """
    tolerance = TOLERANCES[inputs.x.dtype] * (1 if inputs.out_weight is None else 4 / 3)
    values, gradients = by_fused(inputs, skipped=skipped)
    with fused_ops("never"):
        expected = values_and_gradients(layer, in_double(inputs), skipped=skipped)
    assert_near(values, expected[0], tolerance, "value")
    assert_near(gradients, expected[1], tolerance, "gradient")
    for one, name in zip(gradients, given_names(inputs), strict=True):
        assert one.dtype == getattr(inputs, name).dtype


@pytest.mark.parametrize(
    ("dtype", "scores", "without", "skipped"),
    [
        (torch.bfloat16, "both", (), ()),
        (torch.float16, "r", ("out_weight", "out_bias"), ()),
        (torch.float32, "e", (*SHIFTS, "raw_lambda"), ()),
        (torch.float32, "both", ("score_bias", "out_bias"), ("gram_q", "w_e_given_x", "trace")),
        (torch.bfloat16, "both", (), ("out", "lambda_diag")),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(device, kind, dtype, scores, without, skipped):
    inputs = case(device, kind, dtype, without=without, mask=MASKS["empty"], scores=scores)
    check(inputs, skipped=skipped)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("kind", ["static", "dual causal"])
def test_maps(device, kind, feature_map):
    check(case(device, kind, N=23, mask=token_masks(B, 23)["holes"], maps=(feature_map, "elu")))


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        ("sampled", {"H": 1, "P": 64, "S": 30, "C": 64, "M": 61}, torch.bfloat16),
        ("static", {"H": 1, "P": 64, "S": 30, "C": 64}, torch.bfloat16),
        ("dual", {"H": 1, "P": 64, "S": 30, "C": 64}, torch.bfloat16),
        ("dual causal", {"H": 1, "P": 64, "S": 24, "C": 64, "B": 1}, torch.bfloat16),
        ("sampled", {"H": 1, "P": 70, "C": 70, "M": 3}, torch.float16),  # heads go side by side
        ("dual", {"H": 1, "P": 70, "C": 70}, torch.float32),  # the same
        ("static causal", {"H": 1, "P": 70, "C": 70}, torch.bfloat16),
        ("sampled", {"M": 1, "N": 1}, torch.float32),
        ("dual causal", {"N": 1, "P": 2, "S": 1, "C": 1}, torch.float32),
        ("sampled", {"H": 1, "M": 67, "N": 3}, torch.float16),
        ("static causal", {"N": 1}, torch.bfloat16),
        ("static", {"D": 9}, torch.float32),  # other than that of the heads together
        ("dual causal", {"D": 23}, torch.float32),
        ("dual causal", {"N": 67, "P": 16, "S": 16, "C": 16}, torch.bfloat16),
    ],
    ids=str,
)
def test_sizes(device, kind, sizes, dtype):
    check(case(device, kind, dtype, **sizes))


@pytest.mark.parametrize(
    ("mask", "jitter", "count"),
    [("holes", 3.7, 67), ("empty", 3.7, 7), ("none", 0.0, 67), ("holes", 0.0, 7)],
)
def test_landmarks_that_meet(device, mask, jitter, count):
    check(case(device, "sampled", M=count, jitter=jitter, mask=MASKS[mask]))


@pytest.mark.parametrize("without", [(), ("score_bias",)])
def test_many_short_sequences(device, without, monkeypatch):
    """One program has all of a sequence and head where there are enough of them."""
    monkeypatch.setattr("primal_attention.ops.layer.fused_dual.MANY", 1)
    check(case(device, "dual", torch.bfloat16, without=without, mask=MASKS["empty"]))


def test_means_in_several_shares(device, monkeypatch):
    """The backward pass adds up what the walk after it starts from, so that no other pass does."""
    primal = pytest.importorskip("primal_attention.ops.primal.fused")
    small = primal.BACKWARD[torch.bfloat16][16]._replace(block=16, programs=6, least=1)
    monkeypatch.setitem(primal.BACKWARD[torch.bfloat16], 16, small)
    check(case(device, "static causal", torch.bfloat16, mask=MASKS["holes"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_means_in_several_segments(device, dtype, monkeypatch):
    monkeypatch.setattr("primal_attention.ops.triton.launch.SHORTEST", 1)
    check(case(device, "static causal", dtype, N=131, mask=token_masks(B, 131)["padded"]))


@pytest.mark.parametrize("programs", [1, 100])
def test_walks_in_any_number_of_segments(device, programs, monkeypatch):
    monkeypatch.setattr("primal_attention.ops.causal.fused_dual.PROGRAMS", programs)
    monkeypatch.setattr("primal_attention.ops.triton.launch.SHORTEST", 1)
    check(case(device, "dual causal", N=67, mask=token_masks(B, 67)["empty"]))


def test_without_gram_matrices(device):
    for kind in KINDS:
        with_grams, without = (case(device, kind, N=17, grams=grams) for grams in (True, False))
        values, _ = by_fused(without)
        expected = by_fused(with_grams, skipped=("gram_q", "gram_k"))
        assert not values[1].numel()
        assert not values[2].numel()
        assert_bits([values[0], *values[3:]], [expected[0][0], *expected[0][3:]])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_wanted(device, kind):
    inputs = case(device, kind, N=17)
    everything = dict(zip(given_names(inputs), by_fused(inputs)[1], strict=True))
    for wanted in (
        ("x",),
        ("q_weight", "h_weight", "score_weight"),
        ("k_bias", "w_e", "score_bias", "out_weight"),
        ("raw_lambda", "out_bias"),
    ):
        found = by_fused(inputs, wanted=wanted)[1]
        names = [name for name in given_names(inputs) if name in wanted]
        assert_near(found, [everything[name].double() for name in names], 1e-6)


def given_names(inputs):
    return [name for name in TENSORS if getattr(inputs, name) is not None]


@pytest.mark.parametrize("kind", ["static", "sampled", "dual causal"])
def test_parameters_in_half_precision(device, kind):
    inputs = case(device, kind, torch.bfloat16, N=17)
    halves = {name: getattr(inputs, name).bfloat16() for name in given_names(inputs)}
    check(inputs._replace(**halves))


def test_a_parameter_twice(device):
    """What is one tensor in two places gets the sum of both gradients."""
    inputs = case(device, "static", N=17)
    shared = inputs.q_weight.detach().requires_grad_()
    results = []
    for when, run in (("always", fused_layer), ("never", layer)):
        with fused_ops(when):
            result = run(inputs._replace(q_weight=shared, k_weight=shared))
        results.append(torch.autograd.grad(result.out.square().sum(), [shared]))
    assert_near(results[0], [t.double() for t in results[1]], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time_and_from_a_graph_that_is_kept(device, kind):
    """A graph that is freed lets its memory be overwritten; one that is kept does not."""
    inputs = case(device, kind, torch.bfloat16, N=23, mask=token_masks(B, 23)["holes"])
    leaves = {name: getattr(inputs, name).requires_grad_() for name in given_names(inputs)}
    with fused_ops("always"):
        first, second = (fused_layer(inputs._replace(**leaves)) for _ in range(2))
    assert_bits(first, second)
    cotangents = [torch.ones_like(t) for t in first]
    kept, freed, other = (
        torch.autograd.grad(outputs, list(leaves.values()), cotangents, retain_graph=keep)
        for outputs, keep in ((first, True), (first, False), (second, False))
    )
    assert_bits(kept, freed)
    assert_bits(kept, other)


def test_without_gradients(device):
    for kind in KINDS:
        inputs = case(device, kind, N=17)
        with fused_ops("always"), torch.no_grad():
            result = fused_layer(inputs)
        assert_bits(result, by_fused(inputs)[0])


@pytest.mark.parametrize("kind", ["sampled", "dual causal"])
def test_gradients_of_gradients(device, kind):
    """Inputs may be made of each other: x and a weight are."""
    inputs = case(device, kind, N=9, P=3, S=2, C=2, M=4)
    roots = [getattr(inputs, name).detach().requires_grad_() for name in ("x", "q_weight")]

    def penalty(run, x, weight):
        out = run(inputs._replace(x=x, q_weight=weight * x.mean())).out
        grads = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=True)
        return sum(d.square().sum() for d in grads)

    with fused_ops("always"):
        found = torch.autograd.grad(penalty(fused_layer, *roots), roots)
    wide = in_double(inputs)
    inputs, exact = wide, [t.detach().double().requires_grad_() for t in roots]
    with fused_ops("never"):
        expected = torch.autograd.grad(penalty(layer, *exact), exact)
    assert_near(found, expected, 1e-4)


def test_what_is_supported(device):
    def supported(kind, dtype=torch.float32, **options):
        with fused_ops("always"):
            return fused_layer(case(device, kind, dtype, **options)) is not None

    assert supported("static", N=3)
    assert not supported("static", maps=("cosine", "exponential"))
    assert not supported("static", torch.float64)
    assert not supported("static", C=257)
    assert not supported("static", S=129)
    assert not supported("dual causal", torch.bfloat16, P=48, S=24, C=48, H=1)  # read anywhere
    assert not supported("static", N=0)


def test_small_work_and_other_derivatives_take_the_eager_form(device):
    inputs = case(device, "static", N=5)
    assert fused_layer(inputs) is None
    with fused_ops("never"):
        assert fused_layer(inputs) is None
    asked = []

    def out(x):
        with fused_ops("always"):
            asked.append(fused_layer(inputs._replace(x=x)))
        return x.sum()

    torch.func.grad(out)(inputs.x)
    assert asked == [None]


class OnThisDevice:
    """A backend whose op is registered for the device of the tests too."""

    device_type = "cpu"

    def __init__(self):
        from primal_attention.ops.layer.fused import LayerOp

        members = {"name": "layer_on_cpu", "devices": ("cpu", "cuda")}
        self.op = type("LayerOnCPU", (LayerOp,), members)()

    def find(self, name):
        return self.op if name == "layer" else None


@pytest.fixture(scope="module")
def on_this_device():
    return OnThisDevice()


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_registered(device, kind, on_this_device, monkeypatch):
    """The compiler is told the truth of shapes and dtypes, and gets the same gradients."""
    monkeypatch.setattr("primal_attention.ops.op.BACKENDS", {"cpu": on_this_device})
    inputs = case(device, kind, N=9, P=3, S=2, C=2, M=4)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in given_names(inputs)}

    def run(tensors):
        return fused_layer(inputs._replace(**tensors))

    results = []
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for function in (compiled, run):
        with fused_ops("always"):
            outputs = function(leaves)
            cotangents = [torch.ones_like(t) for t in outputs]
            grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
        results.append([*outputs, *grads])
    assert_near(*([t.detach() for t in each] for each in results), 1e-6)
    torch.library.opcheck(
        on_this_device.op.registered, tuple(inputs._replace(**leaves)),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_primal_attention_gives_the_same_fused(device, kind):
    """The layer of the package, with its objective, by the op and in plain PyTorch."""
    from primal_attention import PrimalAttention, ksvd_loss

    weights, causal = KINDS[kind]
    torch.manual_seed(0)
    module = PrimalAttention(12, 2, 3, weights=weights, causal=causal, max_tokens=7).to(device)
    mask = token_masks(2, 19)["holes"].to(device)
    x = randn(2, 19, 12).float().to(device).requires_grad_()
    results = []
    for when in ("always", "never"):
        with fused_ops(when):
            y = module(x, token_mask=mask)
            loss = y.square().sum() + ksvd_loss(module)
            grads = torch.autograd.grad(loss, [x, *module.parameters()])
        results.append([y.detach(), loss.detach()[None], *grads])
    assert_near(results[0], [t.double() for t in results[1]], 2e-5)
