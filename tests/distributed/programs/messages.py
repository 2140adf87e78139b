"""Count the bytes of a layer's messages, forward and backward, at two lengths."""

import torch

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.distributed import count_messages, shard_context
from primal_attention.distributed.costs import layer_messages

SIZES = {"dim": 8, "num_heads": 2, "num_directions": 3}
FORMS = (
    {"weights": "sampled", "samples_per_direction": 2},
    {"weights": "dual"},
    {"weights": "dual", "decay": "learned"},
    {"weights": "static", "causal": True},
    {"weights": "dual", "causal": True},
)


def main(mesh):
    torch.set_default_dtype(torch.float32)
    for options in FORMS:
        layer = PrimalAttention(**SIZES, **options)
        shard_context(layer, mesh, average_gradients=False)
        short, long = (messages_of(layer, length // mesh.size()) for length in (1024, 65_536))
        assert short == long, (options, short, long)
        assert {each.size for each in short} == {mesh.size()} and all(m.sent for m in short)
        told = layer_messages(layer, shards=mesh.size(), batch=1)
        assert told == short, (options, told, short)


def messages_of(layer, length):
    x = torch.randn(1, length, 8, requires_grad=True)
    with count_messages() as messages:
        loss = layer(x).square().mean() + ksvd_loss(layer)
        loss.backward()
    return messages
