"""Hold sharded layers to the contract: torchrun --nproc_per_node 2 .../contract.py."""

import sys

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from primal_attention import PrimalAttention
from primal_attention.distributed import context_inputs, join_tokens, shard_context
from primal_attention.distributed.collectives import with_mean_gradient
from primal_attention.distributed.context import group_of
from primal_attention.testing import check_attention

MESH = []
FORMS = (
    {},
    {"weights": "dual", "decay": "learned", "score_norm": True, "rotary": True},
    {"weights": "static", "causal": True},
    {"weights": "dual", "causal": True},
    {"weights": "dual", "decay": "learned", "causal": True},
)


class WholeSequences(nn.Module):
    """A sharded layer that takes whole sequences, and gives whole outputs, in every process."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dim = layer, layer.dim
        reason = "collectives of several threads have no order that all processes share"
        self.contract_exemptions = {"threads": reason}
        if layer.causal:
            reason = "it decodes by the prefill of the layer, which is no call that a hook sees"
            self.contract_exemptions["submodules"] = reason

    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        (mesh,) = MESH
        shard_context(self.layer, mesh, average_gradients=False)
        number, length = x.shape[1], max(x.shape[1], mesh.size())
        x, token_mask = padded(x, token_mask, length)
        if context is not None:
            context, context_mask = padded(context, context_mask, mesh.size())
        group = group_of(mesh)
        own = {name: with_mean_gradient(p, group) for name, p in self.layer.named_parameters()}
        with context_inputs(mesh, x, context, token_mask, context_mask) as given:
            masks = dict(zip(("token_mask", "context_mask"), given[2:], strict=True))
            y = torch.func.functional_call(self.layer, own, given[:2], masks)
        return join_tokens(y, mesh, length)[:, :number]

    def init_state(self, batch_size):
        return self.layer.init_state(batch_size)

    def prefill(self, x, state=None, **masks):
        return shard_context(self.layer, None).prefill(x, state, **masks)

    def step(self, x_t, state):
        return shard_context(self.layer, None).step(x_t, state)


def padded(x, mask, length):
    missing = length - x.shape[1]
    if missing <= 0:
        return x, mask
    mask = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))


def main():
    distributed.init_process_group("gloo")
    size = distributed.get_world_size()
    MESH.append(init_device_mesh("cpu", (size,), mesh_dim_names=("context",)))
    for options in FORMS:
        torch.manual_seed(0)
        layer = PrimalAttention(8, 2, 3, samples_per_direction=2, **options)
        report = check_attention(WholeSequences(layer), causal=layer.causal)
        if distributed.get_rank() == 0:
            sys.stdout.write(f"{options}\n{report}\n")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
