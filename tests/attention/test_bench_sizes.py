"""Whole layers of the sizes that are benchmarked, on a GPU, against float64.

Small layers take other blocks, other products of the tensor cores and no segments: what a compiler
does to the kernels that are used shows here alone.
"""

import copy

import pytest
import torch

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.op import fused_ops

from .test_lifecycle import FORMS as ALL_FORMS

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMS = [form for form in ALL_FORMS if "feature_map" not in form]
SIZES = [(16, 256), (67, 251), (8, 1024), (2, 4096), (1, 16384), (3, 5003)]  # sequences, tokens


def numbers(layer, x, dy, mask):
    """The output, and the gradients of the input and of all parameters."""
    dtype = next(layer.parameters()).dtype
    x = x.detach().to(dtype).requires_grad_()
    y = layer(x, token_mask=mask)
    torch.autograd.backward([y, ksvd_loss(layer)], [dy.to(dtype), None])
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def errors(found, exact):
    return [
        float((one.double() - other).norm() / other.norm())
        for one, other in zip(found, exact, strict=True)
    ]


def check(device, form, sizes, dim, num_heads, num_directions, *, masked):
    """Errors of the fused ops are at most twice those of the same layer in plain PyTorch."""
    B, N = sizes
    torch.manual_seed(0)
    layer = PrimalAttention(dim, num_heads, num_directions, **form).to(device).train()
    x, dy = torch.randn(2, B, N, dim, device=device, dtype=torch.float64)
    lengths = torch.arange(1, B + 1, device=device) * N // B
    mask = torch.arange(N, device=device) < lengths[:, None] if masked else None
    exact = numbers(copy.deepcopy(layer).double(), x, dy, mask)
    half = layer.to(torch.bfloat16)
    with fused_ops("always" if device == "cuda" else "large"):
        fused = errors(numbers(copy.deepcopy(half), x, dy, mask), exact)
    with fused_ops("never"):
        plain = errors(numbers(copy.deepcopy(half), x, dy, mask), exact)
    assert all(one <= 2 * other + 1e-6 for one, other in zip(fused, plain, strict=True)), (
        f"fused {fused}, in plain PyTorch {plain}"
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_fused_layers_are_as_exact_as_plain_ones(device, form, sizes, masked):
    check(device, form, sizes, 512, 8, 32, masked=masked)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_the_check_on_a_cpu(form):
    check("cpu", form, (2, 61), 32, 2, 3, masked=True)
