"""Real tokens to the front and back again."""

import pytest
import torch

from primal_attention.attention.base.compaction import token_order

from .dense import MASKS, B, C, H, N, assert_close, randn


def packed_one_by_one(x, mask):
    rows = [torch.cat([row[real], row[~real]]) for row, real in zip(x, mask, strict=True)]
    return torch.stack(rows)


@pytest.mark.parametrize("mask", ["padded", "holes", "empty"])
@pytest.mark.parametrize("shape", [(), (C,), (H, C)])
def test_pack_and_unpack(mask, shape):
    mask = MASKS[mask]
    x = randn(B, N, *shape)
    order = token_order(x, mask)
    assert order.pack(x).equal(packed_one_by_one(x, mask))
    assert order.unpack(order.pack(x)).equal(x)
    assert order.pack(mask).equal(order.real())
    assert order.num_real.equal(mask.sum(1))


def test_without_a_mask_nothing_moves():
    x = randn(B, N, C)
    order = token_order(x, None)
    assert order.pack(x) is x
    assert order.unpack(x) is x
    assert order.real().all()


def test_gradients_move_back():
    """Move gradients of strided heads, and gradients of gradients."""
    mask, x = MASKS["holes"], randn(B, H, N, C).transpose(1, 2).requires_grad_()
    order, cotangent = token_order(x, mask), randn(B, N, H, C, seed=1)
    for pack, unpack in ((order.pack, order.unpack), (order.unpack, order.pack)):
        (got,) = torch.autograd.grad(pack(x), x, cotangent)
        assert got.equal(unpack(cotangent))
    narrow = x.detach()[:, :, :1, :2].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: order.pack(z).square(), narrow)


def test_mapped_over_an_axis():
    mask, x = MASKS["holes"], randn(B, N, H, C)
    order = token_order(x, mask)
    got = torch.func.vmap(order.pack, in_dims=2, out_dims=2)(x)
    assert_close(got, order.pack(x), 0.0)
