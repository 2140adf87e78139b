"""The layer as one fused op against the layer in plain PyTorch: values and all gradients."""

import pytest
import torch

from primal_attention.ops.landmarks.choice import IndexInputs, landmark_index
from primal_attention.ops.layer import LayerInputs, fused_layer, layer
from primal_attention.ops.op import fused_ops

from .formulas import MAPS, randn, token_masks
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, poisoned_memory

B, N, H, P, S, C, M = 3, 37, 2, 5, 7, 11, 13
MASKS = token_masks(B, N)
TENSORS = "x", "weight", "shift", "w_e", "w_r", "c_e", "c_r", "bias"
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
    D, dual = heads * width, weights == "dual"
    R = 2 * heads * (width + (s if dual else 0))
    rows = count if weights == "sampled" else width
    c_e, c_r = (part.mT for part in randn(c, 2 * s, seed=3).chunk(2, 1))
    tensors = {
        "x": randn(batch, length, D).to(dtype),
        "weight": randn(R, D, seed=1).to(dtype),
        "shift": randn(R, seed=2).to(dtype),
        "w_e": None if dual else randn(heads, rows, s, seed=4).float(),
        "w_r": None if dual else randn(heads, rows, s, seed=5).float(),
        "c_e": c_e.float(),
        "c_r": c_r.float(),
        "bias": randn(c, seed=6).float(),
    }
    given = {name: None if name in without else t for name, t in tensors.items()}
    moved = (None if t is None else t.to(device) for t in given.values())
    landmarks = None
    if weights == "sampled":
        landmarks = chosen(batch, length, count, mask, options.get("jitter")).to(device), 1.25
    mask = None if mask is None else mask.to(device)
    maps = options.get("maps", ("cosine", "cosine"))
    return LayerInputs(*moved, landmarks, heads, causal, mask, maps, options.get("grams", True))


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
    """Values and all gradients against float64."""
    tolerance = TOLERANCES[inputs.x.dtype]
    values, gradients = by_fused(inputs, skipped=skipped)
    with fused_ops("never"):
        expected = values_and_gradients(layer, in_double(inputs), skipped=skipped)
    assert_near(values, expected[0], tolerance, "value")
    assert_near(gradients, expected[1], tolerance, "gradient")
    for one, other in zip(gradients, [t for t in inputs[:8] if t is not None], strict=True):
        assert one.dtype == other.dtype


@pytest.mark.parametrize(
    ("dtype", "without", "skipped"),
    [
        (torch.bfloat16, (), ()),
        (torch.float16, ("c_e",), ()),
        (torch.float32, ("c_r", "shift"), ()),
        (torch.float32, ("bias",), ("gram_q", "w_e_given_x")),
        (torch.bfloat16, (), ("out",)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(device, kind, dtype, without, skipped):
    check(case(device, kind, dtype, without=without, mask=MASKS["empty"]), skipped=skipped)
