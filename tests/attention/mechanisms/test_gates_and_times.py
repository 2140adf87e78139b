"""Gate, rotary positions, norm and decay of the mechanisms with queries, keys and values."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from primal_attention import ATTENTIONS, build_attention
from primal_attention.attention import options_of
from primal_attention.ops.op import chunk_elements

from ..dense import MASKS, B, N, assert_close, assert_same_with_gradients, randn
from ..test_time_weighted import turned

DIM, H = 12, 3


def build(name, causal=False, **options):
    torch.manual_seed(0)
    return build_attention(name, DIM, H, causal=causal, **options).double()


def tokens(length=N):
    return randn(B, length, DIM).requires_grad_()


def dense(layer, x, mask, attend):
    """Each sequence alone and without its padding; attend has heads first, [H, n, C]."""
    rows = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        sequence = x[b, real]
        if not real.any():
            rows.append(torch.zeros_like(x[b]))
            continue
        q, k, v = (
            project(sequence).view(len(sequence), H, -1).transpose(0, 1)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if layer.rotary:
            q, k = turned(q, len(sequence)), turned(k, len(sequence))
        heads = attend(sequence, q, k, v).transpose(0, 1).flatten(1)
        if layer.gate:
            heads = heads * F.silu(layer.gate_proj(sequence))
        rows.append(torch.zeros_like(x[b]).masked_scatter(real[:, None], layer.out_proj(heads)))
    return torch.stack(rows)


def dense_linear(layer, x, mask):
    def attend(sequence, q, k, v):
        phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
        kernel = phi_q @ phi_k.mT
        if layer.decay is not None:
            learned = layer.decay == "learned"
            logits = layer.decay_proj(sequence) if learned else layer.raw_decay[None]
            logits = logits.expand(len(sequence), -1)
            times = -F.logsigmoid(logits).T.cumsum(-1)
            kernel = kernel * (-(times[:, :, None] - times[:, None, :]).abs()).exp()
        kernel = kernel.tril() if layer.causal else kernel
        if not layer.score_norm:
            return kernel / kernel.sum(-1, keepdim=True) @ v
        out = kernel @ v
        return out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.score_gain

    return dense(layer, x, mask, attend)


LINEAR = [
    {"decay": "learned"},
    {"decay": "learned", "score_norm": True, "gate": True},
    {"decay": "fixed", "score_norm": True},
    {"score_norm": True, "gate": True},
    {"gate": True},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", LINEAR, ids=str)
def test_linear_attention_with_time_and_norm(options, mask, causal):
    layer, x = build("linear", causal, **options), tokens()
    if layer.score_norm:
        torch.nn.init.uniform_(layer.score_gain, 0.5, 1.5)
    with chunk_elements(1):
        got = layer(x, token_mask=MASKS[mask])
        want = dense_linear(layer, x, MASKS[mask])
        assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_attention_with_rotary_positions_and_a_gate(mask, causal):
    layer, x = build("softmax", causal, gate=True, rotary=True), tokens()

    def attend(sequence, q, k, v):
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -torch.inf)
        return logits.softmax(-1) @ v

    got, want = layer(x, token_mask=MASKS[mask]), dense(layer, x, MASKS[mask], attend)
    assert_same_with_gradients(layer, got, want, [x])


DECODING = [
    *(("linear", options) for options in LINEAR),
    ("softmax", {"gate": True, "rotary": True}),
    ("flow", {"gate": True, "rotary": True}),
]


@pytest.mark.parametrize(("name", "options"), DECODING, ids=str)
def test_decoding_goes_on_from_any_state(name, options):
    layer, x, mask = build(name, True, **options).eval(), tokens(), MASKS["holes"]
    want = layer(x, token_mask=mask)
    first, state = layer.prefill(x[:, :11], token_mask=mask[:, :11])
    second, state = layer.prefill(x[:, 11:], state, token_mask=mask[:, 11:])
    assert_close(torch.cat((first, second), 1), want)
    whole, state = layer(x), layer.init_state(B)
    for t in range(N):
        y, state = layer.step(x[:, t], state)
        assert_close(y, whole[:, t])


def test_a_norm_goes_with_a_context():
    layer, x, context = build("linear", score_norm=True), tokens(), randn(B, 7, DIM, seed=1)
    mask = MASKS["holes"][:, :7]
    got = layer(x, context, context_mask=mask)
    moved = layer(x, torch.where(mask[:, :, None], context, 3.0), context_mask=mask)
    assert_close(got, moved)
    with pytest.raises(ValueError, match="a context does not go with decay='learned'"):
        build("linear", decay="learned")(x, context)


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"scales=\[1, 1, 2\] does not go with decay='fixed'"):
        build("linear", scales=[1, 1, 2], decay="fixed")
    with pytest.raises(ValueError, match="does not go with a normalised feature_map"):
        build("linear", decay="fixed", feature_map="exponential")
    with pytest.raises(ValueError, match="rotary=True needs an even head dimension, got 3"):
        build_attention("softmax", 9, 3, rotary=True)


QKV = [name for name in ATTENTIONS if not name.startswith("primal")]


@pytest.mark.parametrize("name", QKV)
def test_common_options_of_all_mechanisms(name):
    assert {"causal", "dropout", "bias", "gate", "rotary"} <= options_of(name).keys()
    layer, heads = build(name, gate=True).eval(), []
    layer.out_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    x = tokens()
    layer(x)
    plain = build(name).eval()
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.out_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    plain(x)
    assert_close(heads[0], heads[1] * F.silu(layer.gate_proj(x)))
    if not ATTENTIONS[name].mechanism.rotary:
        with pytest.raises(ValueError, match="rotary"):
            build(name, rotary=True)


def test_the_signature_of_a_layer_is_not_that_of_its_class():
    layer = build("softmax")
    assert "gate" in inspect.signature(type(layer)).parameters
    assert "gate" not in inspect.signature(layer).parameters
