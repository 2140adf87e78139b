"""Compare layers whose sequences are sharded with the same layers of whole sequences."""

import copy

import torch

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.distributed import context_inputs, join_tokens, shard_context
from primal_attention.distributed.collectives import with_mean_gradient
from primal_attention.distributed.context import group_of
from primal_attention.ops.op import chunk_elements

DIM, HEADS, B, N = 8, 2, 3, 13
LENGTHS = {2: (4, 9), 4: (1, 7, 2, 3)}  # of unequal shards
TIMED = {"weights": "dual", "score_norm": True, "gate": True, "feature_map": "unit_elu"}
FORMS = {
    "static": {"weights": "static"},
    "sampled": {"weights": "sampled"},
    "jittered": {"landmark_jitter": 0.7, "landmark_dropout": 0.4},
    "dual": {"weights": "dual", "feature_map": "elu"},
    "normed": TIMED,
    "normalised": {"weights": "static", "feature_map": "exponential"},
    "rotary": {"rotary": True, "gate": True, "scores": "e"},
    "fixed": {**TIMED, "decay": "fixed", "rotary": True},
    "learned": {**TIMED, "decay": "learned"},
    "causal static": {"weights": "static", "causal": True, "rotary": True},
    "causal static elu": {"weights": "static", "causal": True, "feature_map": "elu"},
    "causal normalised": {"weights": "static", "causal": True, "feature_map": "exponential"},
    "causal dual": {"weights": "dual", "causal": True},
    "causal dual normalised": {"weights": "dual", "causal": True, "feature_map": "exponential"},
    "causal normed": {**TIMED, "causal": True, "rotary": True},
    "causal fixed": {**TIMED, "decay": "fixed", "causal": True},
    "causal learned": {**TIMED, "decay": "learned", "causal": True, "scores": "r"},
}
OBJECTIVES = ("zero", "released", "released_batch", "explained_energy")


def main(mesh):
    torch.manual_seed(0)
    holes = torch.rand(B, N) < 0.6
    holes[1] = torch.arange(N) < 2  # later shards have no real token of it
    holes[2] = False
    for name, options in FORMS.items():
        layer = PrimalAttention(DIM, HEADS, 3, samples_per_direction=2, **options)
        if mesh.size() == 2:
            compare(mesh, name, layer, None)
        compare(mesh, f"{name}, with holes", layer, holes, lengths=LENGTHS.get(mesh.size()))
        if (
            mesh.size() == 2
            and not layer.causal
            and layer.decay is None
            and layer.weights != "static"
        ):
            compare(mesh, f"{name}, with a context", layer, holes, cross=True)
    for name in ("learned", "causal dual"):
        with chunk_elements(64):  # 16 tokens
            layer = PrimalAttention(DIM, HEADS, **FORMS[name])
            compare(mesh, f"{name}, in chunks", layer, torch.rand(B, 71) < 0.9)
    refuse(mesh)


def compare(mesh, what, layer, mask, *, lengths=None, cross=False):
    length = N if mask is None else mask.shape[1]
    tokens = torch.randn(2, B, length, DIM), torch.randn(B, N, DIM) if cross else None
    layer.zero_grad()
    ours = shard_context(copy.deepcopy(layer), mesh)
    torch.manual_seed(1)
    want = results(layer, tokens, mask)
    torch.manual_seed(1)
    got = results(ours, tokens, mask, mesh, lengths)
    assert got.keys() == want.keys()
    for key in want:
        close = torch.allclose(got[key], want[key], rtol=1e-10, atol=1e-10)
        assert close, f"{what}: {key}: {(got[key] - want[key]).abs().max()}"


def results(layer, tokens, mask, mesh=None, lengths=None):
    """Outputs, objectives and all gradients, of whole sequences or of shards that are joined."""
    (x, cotangent), context = tokens
    x = x.clone().requires_grad_()
    context = None if context is None else context.clone().requires_grad_()
    given, size = (x, mask, cotangent, context), 1
    if lengths is not None:
        group, size = group_of(mesh), mesh.size()
        shared = with_mean_gradient(x, group)
        given = [t if t is None else t.split(lengths, 1)[group.rank] for t in (shared, *given[1:])]
    elif mesh is not None:
        size = mesh.size()
        with context_inputs(mesh, *given) as given:
            pass
    mine, own_mask, own_cotangent, own_context = given
    y = layer(mine, own_context, token_mask=own_mask)
    found = {"output": y if mesh is None else join_tokens(y, mesh)}
    loss = size * (y * own_cotangent).sum()
    for objective in OBJECTIVES:
        if layer.decay is None or objective != "explained_energy":
            found[objective] = ksvd_loss(layer, objective=objective)
            loss = loss + found[objective]
    loss.backward()
    found |= {f"d {name}": p.grad for name, p in layer.named_parameters()} | {"d x": x.grad}
    return found if context is None else {**found, "d context": context.grad}


def refuse(mesh):
    """Say what needs whole sequences."""
    layer = shard_context(PrimalAttention(DIM, HEADS, weights="static", causal=True), mesh)
    x = torch.randn(1, 4, DIM)
    calls = {
        "cu_seqlens": lambda: layer(x, cu_seqlens=torch.tensor([0, 4])),
        "prefill": lambda: layer.prefill(x),
        "features_and_weights": lambda: layer.features_and_weights(x),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            assert f"{name} needs whole sequences" in str(error)
        else:
            raise AssertionError(name)
    shard_context(layer, None).prefill(x)
