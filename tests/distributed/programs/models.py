"""Compare sharded models inside DDP, FSDP2, torch.compile and patched hosts with whole ones."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from primal_attention import PrimalAttention, ksvd_loss, patch
from primal_attention.distributed import context_inputs, join_tokens, shard_context
from primal_attention.models import Encoder

B, N, DIM = 4, 11, 8
OPTIONS = (
    {},
    {"weights": "dual", "decay": "learned", "score_norm": True},
    {"weights": "dual", "causal": True, "rotary": True},
)


def main(mesh):
    halves = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("data", "context"))
    torch.manual_seed(0)
    layers = [PrimalAttention(DIM, 2, 3, samples_per_direction=2, **each) for each in OPTIONS]
    model = Encoder(layers, DIM, 12)
    x, mask = torch.randn(B, N, DIM), torch.rand(B, N) < 0.7
    mask[:, 0] = True
    want = gradients(model, x, mask)
    number, index = halves.size(0), halves.get_local_rank("data")
    own = x.chunk(number)[index], mask.chunk(number)[index]
    for wrap in (ddp, fsdp):
        check(wrap.__name__, gradients(wrap(copy.deepcopy(model), halves), *own, halves), want)
    model = Encoder(layers[1:2], DIM, 12)
    want = gradients(model, x, mask)
    check("compiled", gradients(compiled(copy.deepcopy(model), mesh), x, mask, mesh), want)
    bert(mesh)


def ddp(model, mesh):
    """Average over the data here; shard_context averages over the context."""
    model = shard_context(model, mesh)
    return DistributedDataParallel(model, process_group=mesh["data"].get_group())


def fsdp(model, mesh):
    """Shard parameters over one dimension, copy them over the other, and average over both."""
    model = shard_context(model, mesh, average_gradients=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(model, mesh):
    model = shard_context(model, mesh)
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def gradients(model, x, mask, mesh=None):
    """Gradients of the mean of squares and the objective."""
    model.zero_grad()
    share = 1.0
    if mesh is None:
        y = model(x, token_mask=mask)
    else:
        with context_inputs(mesh, x, mask) as (x, mask):
            y = model(x, token_mask=mask)
        share = mesh["context"].size() * x.shape[1] / N
    (share * y.square().mean() + ksvd_loss(model)).backward()
    return {
        name.removeprefix("module."): getattr(p.grad, "full_tensor", p.grad.clone)()
        for name, p in model.named_parameters()
    }


def check(what, got, want):
    assert got.keys() == want.keys()
    for key in want:
        close = torch.allclose(got[key], want[key], rtol=1e-10, atol=1e-10)
        assert close, f"{what}: {key}: {(got[key] - want[key]).abs().max()}"


def bert(mesh):
    """Run a patched host on its tokens; one with an attention of its own is refused."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=9,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=11,
        hidden_dropout_prob=0.0,
    )
    model = BertModel(config, add_pooling_layer=False)
    patch(model, layers=-1, num_directions=3)
    try:
        shard_context(model, mesh)
    except ValueError as error:
        assert "encoder.layer.0.attention.self needs whole sequences" in str(error)
    else:
        raise AssertionError("half patched")
    patch(model, layers=0, num_directions=3)
    torch.manual_seed(2)
    ids, mask = torch.randint(9, (2, N)), torch.rand(2, N) < 0.7
    positions = torch.arange(N).expand(2, N)
    want = model(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state
    shard_context(model, mesh)
    with context_inputs(mesh, ids, mask.long(), positions) as (ids, own, positions):
        y = model(ids, attention_mask=own, position_ids=positions).last_hidden_state
    y = join_tokens(y, mesh)
    assert torch.allclose(y[mask], want[mask], rtol=1e-10, atol=1e-10)
