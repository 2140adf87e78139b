"""Train a few steps from the last sharded checkpoint of a folder, and write the weights."""

import shutil

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.distributed import context_inputs, shard_context
from primal_attention.distributed.checkpoint import load_sharded, save_sharded
from primal_attention.models import Encoder

N, DIM = 8, 8


def main(mesh, folder, out, kept=None):
    torch.manual_seed(0)
    model = Encoder([PrimalAttention(DIM, 2, 3, weights="dual", decay="learned")], DIM, 12)
    shard_context(model, mesh, average_gradients=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    first = load_sharded(folder, model, optimizer)
    for step in range(first, 4):
        x = torch.randn(2, N, DIM, generator=torch.Generator().manual_seed(step))
        with context_inputs(mesh, x) as (x,):
            loss = model(x)[..., 0].square().mean() + ksvd_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        path = save_sharded(folder, model, optimizer, step + 1)
        if step == 1 and kept is not None and mesh.get_rank() == 0:
            shutil.copytree(path, kept / path.name)
    whole = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.state_dict().items()
    }
    if mesh.get_rank() == 0:
        torch.save({"first": first, **whole}, out)
