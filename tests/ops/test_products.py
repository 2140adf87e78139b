"""Products by oneDNN: the same values, and only where it is quicker."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from primal_attention import PrimalAttention
from primal_attention.ops import products
from primal_attention.ops.products import affine, is_large_on_cpu


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_affine_is_linear(transposed, bias, monkeypatch):
    monkeypatch.setattr(products, "_LARGE", 0)
    torch.manual_seed(0)
    x, shift = torch.randn(2, 13, 7), torch.randn(11) if bias else None
    weight = torch.randn(7, 11).mT if transposed else torch.randn(11, 7)
    assert_close(affine(x, weight, shift), F.linear(x, weight, shift))


def test_only_large_products_in_float32_are_for_onednn():
    x, weight = torch.empty(4096, 512), torch.empty(512, 512)
    assert is_large_on_cpu(x, weight)
    assert not is_large_on_cpu(x[:17], weight)
    assert not is_large_on_cpu(x.double(), weight.double())
    assert not is_large_on_cpu(x.to("meta"), weight.to("meta"))


def gradients(layer, x):
    y = layer(x)
    return [
        y,
        *torch.autograd.grad(y.square().sum(), [x, layer.q_proj.weight, layer.out_proj.bias]),
    ]


def test_a_layer_has_the_same_gradients(monkeypatch):
    torch.manual_seed(0)
    layer, x = PrimalAttention(15, 3, 5, max_tokens=11), torch.randn(2, 11, 15, requires_grad=True)
    by_blas = gradients(layer, x)
    monkeypatch.setattr(products, "_LARGE", 0)
    for given, expected in zip(gradients(layer, x), by_blas, strict=True):
        assert_close(given, expected)
