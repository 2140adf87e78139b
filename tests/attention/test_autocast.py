"""Under autocast the layer is as exact as plain arithmetic, and keeps its tokens once."""

import pytest
import torch

from primal_attention import ksvd_loss

from .dense import MASKS, B, D, N, build, dense, randn

FORMS = {
    "static": {"weights": "static"},
    "static causal": {"weights": "static", "causal": True},
    "sampled": {"weights": "sampled"},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
}
WITH_A_CONTEXT = ["sampled", "dual"]
LONG = 229  # so many tokens that no small matrix is as large


def gradients(function, layer, inputs, mask, *, low=False):
    """Outputs, and the gradients of all inputs and parameters that they depend on."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        y = function(layer, leaves[0], mask, *leaves[1:])
    named = {f"input {i}": x for i, x in enumerate(leaves)} | dict(layer.named_parameters())
    del named["raw_lambda"]
    grads = torch.autograd.grad(y, list(named.values()), randn(*y.shape, seed=77, dtype=y.dtype))
    return {"outputs": y.detach(), **dict(zip(named, grads, strict=True))}


def layer_itself(layer, x, mask, context=None):
    return layer(x, context, token_mask=mask)


def assert_as_exact_as_plain_arithmetic(form, inputs, mask):
    """Near float64, and not further from it than twice what autocast makes of the formulas."""
    layer = build(**FORMS[form], dtype=torch.float32).train()
    given = layer, [x.float() for x in inputs], mask
    found, plain = (gradients(run, *given, low=True) for run in (layer_itself, dense))
    exact = gradients(dense, layer.double(), inputs, mask)
    for name, expected in exact.items():
        error, allowed = ((run[name] - expected).norm() for run in (found, plain))
        assert error < 0.02 * expected.norm(), name
        assert error < 2 * allowed, name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, mask):
    x, real = randn(B, N, D, dtype=torch.float32).double(), MASKS[mask]
    if real is not None:
        x = torch.where(real[..., None], x, float("nan"))
    assert_as_exact_as_plain_arithmetic(form, [x], real)


@pytest.mark.parametrize("form", WITH_A_CONTEXT)
def test_values_and_gradients_with_a_context(form):
    inputs = [randn(B, n, D, seed=n, dtype=torch.float32).double() for n in (N, N + 6)]
    assert_as_exact_as_plain_arithmetic(form, inputs, MASKS["holes"])


def bytes_kept(form, dtype, *, low=False, crossing=False, **options):
    """By the graph and by what the objectives need, beside the parameters."""
    layer = build(**FORMS[form], dtype=dtype).train()
    x, *context = (randn(B, LONG, D, dtype=dtype, seed=i) for i in range(1 + crossing))
    if "cu_seqlens" in options:
        x = x.flatten(0, 1)
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    given = [tensor.requires_grad_() * 1 for tensor in (x, *context)]  # autocast caches leaves
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=low),
    ):
        outputs = layer(*given, **options), ksvd_loss(layer)
        for run in layer.passes.runs:
            if run.landmarks is not None:
                keep(run.landmarks.x)
        total = sum(kept.values())  # while the graph, and so every storage, is alive
    assert all(output.requires_grad for output in outputs)
    return total


CALLS = {
    "alone": {},
    "masked": {"token_mask": torch.arange(LONG).expand(B, LONG) % 5 > 0},
    "packed": {"cu_seqlens": torch.tensor([0, 101, B * LONG])},
    "crossing": {"crossing": True},
}


@pytest.mark.parametrize(
    ("form", "call"),
    [
        (form, call)
        for form in FORMS
        for call in CALLS
        if call != "crossing" or form in WITH_A_CONTEXT
    ],
)
def test_no_more_is_kept_than_in_half_precision(form, call):
    """The small matrices have float32; another copy of the tokens would be as large as they are."""
    under_autocast = bytes_kept(form, torch.float32, low=True, **CALLS[call])
    in_half_precision = bytes_kept(form, torch.bfloat16, **CALLS[call])
    one_copy = B * LONG * D * torch.bfloat16.itemsize
    assert under_autocast < in_half_precision + one_copy
