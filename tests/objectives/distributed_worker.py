"""One process of test_distributed.py: how far are its gradients from those of one process?

Started by ``python -m torch.distributed.run``; process 0 writes {mode: {case: deviation}} as JSON.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from primal_attention import PrimalAttention, ksvd_loss, patch, record_ksvd

OBJECTIVES = ["released", "zero", "explained_energy"]
KINDS = {
    "static causal": {"weights": "static", "causal": True},
    "sampled": {"weights": "sampled"},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
    "e alone": {"weights": "sampled", "scores": "e"},
}
NO_OBJECTIVE = ("static causal", "sampled", "dual")
B, N, D, H, S = 2, 11, 15, 3, 7  # B sequences a process


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = PrimalAttention(D, H, S, samples_per_direction=2, **options)
        self.second = PrimalAttention(D, H, S, samples_per_direction=2, **options)
        self.double()

    def forward(self, x, token_mask, checkpointed=False):
        for layer in (self.first, self.second):
            if checkpointed:
                x = x + checkpoint(layer, x, token_mask=token_mask, use_reentrant=False)
            else:
                x = x + layer(x, token_mask=token_mask)
        return x


class Patched(nn.Module):
    """A model of PyTorch's own with all of its attention replaced."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        patch(self.encoder, "primal", "all", num_directions=S, samples_per_direction=2, **options)
        self.first, self.second = (each.self_attn for each in self.encoder.layers)
        self.double()

    def forward(self, x, token_mask):
        return self.encoder(x, src_key_padding_mask=~token_mask)


def shard_layers(model):
    fully_shard(model.first)
    fully_shard(model.second)
    return shard_root(model)


def shard_root(model):
    fully_shard(model)
    return model


MODES = {"ddp": DistributedDataParallel, "fsdp layers": shard_layers, "fsdp root": shard_root}


def batch():
    """All sequences of one step; every one has a real token."""
    x = torch.randn(B * dist.get_world_size(), N, D, dtype=torch.float64)
    token_mask = torch.rand(x.shape[:2]) > 0.3
    token_mask[:, 3] = True
    return x, token_mask


def mine(*tensors):
    first = B * dist.get_rank()
    return [tensor[first : first + B] for tensor in tensors]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model, x, token_mask, objective):
    loss = model(x, token_mask).square().mean()
    if objective is not None:
        loss = loss + ksvd_loss(model, objective=objective)
    loss.backward()


def two_towers(model, x, token_mask, objective):
    """Both towers through one model, their activations checkpointed."""
    with record_ksvd(model):
        first, second = (model(tower, token_mask, checkpointed=True) for tower in (x, x.flip(1)))
        loss = (first * second).mean() + ksvd_loss(model, objective=objective)
    loss.backward()


def deviation(mode, kind, objective, backward=backward, *, kind_of=Model, frozen=False):
    """Largest relative difference of a gradient over two steps of gradient descent."""
    reference = kind_of(**KINDS[kind])
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not (frozen and "raw_lambda" in name))
    model = MODES[mode](copy.deepcopy(reference))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (reference, model)]
    worst = 0.0
    for _ in range(2):
        x, token_mask = batch()
        backward(reference, x, token_mask, objective)
        backward(model, *mine(x, token_mask), objective)
        for expected, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            if expected.grad is not None:
                difference = (whole(parameter.grad) - expected.grad).abs().max()
                size = expected.grad.abs().max()  # zero for Lambda where nothing trains it
                worst = max(worst, float(torch.where(size > 0, difference / size, difference)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def main(path):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    measured = {
        mode: {
            f"{kind} {name}": deviation(mode, kind, name) for kind in KINDS for name in OBJECTIVES
        }
        for mode in MODES
    }
    measured["two towers"] = {
        f"{mode} {kind}": deviation(mode, kind, "released", two_towers)
        for mode in MODES
        for kind in KINDS
    }
    for name, frozen in {"no objective": False, "no objective, lambda frozen": True}.items():
        measured[name] = {
            f"{mode} {kind}": deviation(mode, kind, None, frozen=frozen)
            for mode in MODES
            for kind in NO_OBJECTIVE
        }
    measured["patched, no objective"] = {
        kind: deviation("ddp", kind, None, kind_of=Patched) for kind in ("sampled", "dual")
    }
    if dist.get_rank() == 0:
        path.write_text(json.dumps(measured))
    dist.barrier()  # a process that leaves early makes gloo abort in the other now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
