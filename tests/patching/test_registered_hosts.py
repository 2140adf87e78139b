"""A family of attention modules that somebody else makes known."""

import pytest
import torch
from torch import nn

from primal_attention import ksvd_loss, patch, plan, unpatch
from primal_attention.patching import (
    Affine,
    Host,
    PatchedAttention,
    Projections,
    load_patched,
    register_host,
    save_patched,
)
from primal_attention.patching.hosts import HOSTS

from .families import B, D, H, N, assert_close, real_tokens


class ToyAttention(nn.Module):
    """Softmax attention whose projections of queries, keys and values are one."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, real):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
        return self.out(y.transpose(1, 2).flatten(2))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.attentions = nn.ModuleList(ToyAttention() for _ in range(2))

    def forward(self, x, real):
        for attention in self.attentions:
            x = x + attention(x, real)
        return x


class PatchedToy(PatchedAttention):
    def forward(self, x, real):
        return self.mechanism(x, token_mask=real)


class ToyHost(Host):
    name = "Toy"

    def owns(self, module):
        return type(module) is ToyAttention

    def read(self, module, ancestors):
        q, k, v = Affine.of(module.qkv).split(3)
        return Projections(q, k, v, Affine.of(module.out), num_heads=H)

    def adapt(self, module, mechanism):
        return PatchedToy(mechanism)


@pytest.fixture(autouse=True)
def known():
    before = list(HOSTS)
    register_host(ToyHost())
    yield
    HOSTS[:] = before


def test_it_is_patched_trained_saved_and_undone(tmp_path):
    model, x, real = Toy(), torch.randn(B, N, D), real_tokens()
    y = model(x, real)
    assert_close(patch(model, "softmax", "all")(x, real)[real], y[real])
    unpatch(model)
    assert str(plan(model)).startswith("Toy (Toy): 1 of 2 attention layers become primal")
    patch(model, num_directions=4).train()
    x.requires_grad_()
    (model(x, real)[real].square().sum() + ksvd_loss(model)).backward()
    layer = model.attentions[1]
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    assert x.grad[real].any() and not x.grad[~real].any()
    save_patched(model.eval(), tmp_path)
    x = x.detach()
    assert torch.equal(load_patched(tmp_path, Toy())(x, real), model(x, real))
    assert torch.equal(unpatch(model)(x, real), y)


def test_gradients_are_those_of_the_outputs():
    model, real = patch(Toy(), layers="all", num_directions=3).double(), real_tokens()
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: model(x, real)[real], x, fast_mode=True)


def test_one_of_the_same_name_takes_its_place():
    other = ToyHost()
    register_host(other)
    assert [host for host in HOSTS if host.name == "Toy"] == [other]
    with pytest.raises(ValueError, match=r"must be an instance of a subclass of Host.*ToyHost"):
        register_host(ToyHost)
