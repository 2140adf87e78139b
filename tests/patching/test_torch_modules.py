"""Plain PyTorch modules: layouts, masks with True at padding, the fused path, cross-attention."""

import pytest
import torch
from torch import nn

from primal_attention import ATTENTIONS, build_attention, patch, unpatch

from .families import B, D, Decoder, H, N, assert_close, real_tokens

CROSSING = [name for name, kind in ATTENTIONS.items() if kind.mechanism.cross]
READS_OTHER_QUERIES = {"flow", "cosformer"}


class Host(nn.Module):
    """A multi-head attention with a name."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, **options)

    def forward(self, *tokens, **masks):
        return self.attention(*tokens, need_weights=False, **masks)[0]


@pytest.fixture
def host():
    return Host(batch_first=True).eval()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layers", [0, 1, "all"])
def test_the_fused_path_of_evaluation_is_left(layers):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 17, batch_first=True), 2)
    encoder.eval()
    x, mask = torch.randn(B, N, D), real_tokens()
    y = encoder(x, src_key_padding_mask=~mask)
    assert encoder.use_nested_tensor
    patch(encoder, "softmax", layers)
    assert_close(encoder(x, src_key_padding_mask=~mask)[mask], y[mask])
    patched = [layer.self_attn for layer in encoder.layers]
    with torch.no_grad():  # what is computed is the patched layer, not the host's weights
        for attention in patched:
            if not isinstance(attention, nn.MultiheadAttention):
                attention.mechanism.out_proj.weight.zero_()
    assert not torch.allclose(encoder(x, src_key_padding_mask=~mask)[mask], y[mask], atol=1e-3)
    unpatch(encoder)
    assert encoder.use_nested_tensor
    assert torch.equal(encoder(x, src_key_padding_mask=~mask), y)


@torch.no_grad()
@pytest.mark.parametrize("as_numbers", [False, True])
def test_masks_hide_where_they_are_true_or_infinite(host, as_numbers):
    x, padding = torch.randn(B, N, D), ~real_tokens()
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    if as_numbers:
        padding, future = (
            torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in (padding, future)
        )
    masks = {"key_padding_mask": padding, "attn_mask": future}
    y = host(x, x, x, **masks)
    patch(host, "softmax", causal=True)
    assert_close(host(x, x, x, **masks)[real_tokens()], y[real_tokens()])
    per_head = future.expand(B * H, N, N)
    again = host(x, x, x, key_padding_mask=padding, attn_mask=per_head)
    assert_close(again[real_tokens()], y[real_tokens()])


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [False, True])
def test_layouts(batch_first):
    host = Host(batch_first=batch_first).eval()
    x, context = torch.randn(5, 7, D), torch.randn(5 if batch_first else 3, 7, D)
    if batch_first:
        context = context[:, :3]
    expected = host(x, x, x), host(x, context, context), host(x[0], x[0], x[0])
    patch(host, "softmax")
    actual = host(x, x, x), host(x, context, context), host(x[0], x[0], x[0])
    for y, z in zip(actual, expected, strict=True):
        assert_close(y, z)


@torch.no_grad()
@pytest.mark.parametrize("attention", [n for n in CROSSING if n not in READS_OTHER_QUERIES])
def test_cross_attention_of_a_decoder(attention):
    """Padded memory does not matter, and no query sees another."""
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 17, batch_first=True), 1)
    patch(decoder.eval(), attention, "layers.0.multihead_attn")
    x, memory, mask = torch.randn(B, 5, D), torch.randn(B, N, D), real_tokens()
    future = nn.Transformer.generate_square_subsequent_mask(5)

    def run(x, memory):
        return decoder(
            x, memory, tgt_mask=future[: x.shape[1], : x.shape[1]], memory_key_padding_mask=~mask
        )

    y = run(x, memory)
    assert_close(run(x, torch.where(mask[..., None], memory, torch.nan)), y, 1e-6)
    assert_close(run(x[:, :3], memory), y[:, :3])
    assert not torch.allclose(run(x, memory.flip(0)), y, atol=1e-3)


@pytest.mark.parametrize("attention", sorted(READS_OTHER_QUERIES))
def test_mechanisms_that_sum_over_queries_are_refused_as_cross_attention(host, attention):
    with pytest.raises(ValueError, match="sums over all queries"):
        patch(Decoder(), attention, "all")
    patch(host, attention)
    x, context = torch.randn(B, 5, D), torch.randn(B, 3, D)
    with pytest.raises(ValueError, match="sums over all queries"):
        host(x, context, context)
    with pytest.raises(ValueError, match="sums over all queries"):
        patch(Decoder(), "primal", "decoder.layers.0.multihead_attn", weights="dual")


@torch.no_grad()
@pytest.mark.parametrize("attention", CROSSING)
def test_which_mechanisms_sum_over_queries(attention):
    """The list above is what the mechanisms do."""
    layer = build_attention(attention, D, H).eval()
    x, context = torch.randn(B, 11, D), torch.randn(B, 7, D)
    alone = torch.allclose(layer(x, context)[:, :2], layer(x[:, :2], context), atol=1e-5)
    assert alone == (attention not in READS_OTHER_QUERIES)


def test_what_cannot_be_honoured_is_an_error(host):
    x = torch.randn(B, N, D)
    with pytest.raises(ValueError, match="no cross-attention"):
        patch(Decoder(), "nystrom", "decoder.layers.0.multihead_attn")
    with pytest.raises(ValueError, match="itself"):
        patch(host.attention)
    for options in ({"kdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match=r"attention: MultiheadAttention with .* cannot be"):
            patch(Host(**options))
    patch(host)
    with pytest.raises(ValueError, match="value must be the tensor passed as key"):
        host(x, x, x + 1)
    with pytest.raises(ValueError, match="more than padding"):
        host(x, x, x, attn_mask=torch.ones(N, N, dtype=torch.bool).triu(1))
    unpatch(host)
    patch(host, causal=True)
    with pytest.raises(ValueError, match="asks for full attention"):
        host(x, x, x)
