"""The drop-in for nn.MultiheadAttention: values, masks, layouts, Transformer layers, refusals."""

import copy

import pytest
import torch
from torch import nn

from primal_attention import ATTENTIONS, PrimalMultiheadAttention, ksvd_loss, patch, plan, unpatch
from primal_attention.testing import check_attention
from primal_attention.testing.adapters import adapt

from .families import B, D, H, N, assert_close, real_tokens

FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)


def built(**options):
    return PrimalMultiheadAttention(D, H, batch_first=True, **options).eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_values_are_those_of_the_mechanism(attention):
    layer, x, real = built(attention=attention), torch.randn(B, N, D), real_tokens()
    y, weights = layer(x, x, x, key_padding_mask=~real)
    assert weights is None
    assert_close(y, layer.mechanism(x, token_mask=real))
    assert_close(layer(x)[0], layer.mechanism(x))
    layer.batch_first = False
    assert_close(layer(x.transpose(0, 1), key_padding_mask=~real)[0].transpose(0, 1), y)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [False, True])
def test_softmax_is_the_attention_of_torch(batch_first):
    options = {"batch_first": batch_first, "dtype": torch.float64}
    host = nn.TransformerEncoderLayer(D, H, 17, 0.0, **options).eval()
    layer = PrimalMultiheadAttention(D, H, attention="softmax", **options).eval()
    expected = host.self_attn
    layer.load_state_dict(patch(host, "softmax").self_attn.state_dict())
    x, context = torch.randn(B, 5, D).double(), torch.randn(B, N, D).double()
    padding = ~real_tokens()
    if not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    one = x[0] if batch_first else x[:, 0]
    other = context[0] if batch_first else context[:, 0]
    for tokens, masks in [
        ((x, x, x), {}),
        ((x, context, context), {"key_padding_mask": padding}),
        ((one, one, one), {}),
        ((one, other, other), {"key_padding_mask": padding[-1]}),
    ]:
        torch.testing.assert_close(layer(*tokens, **masks)[0], expected(*tokens, **masks)[0])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "softmax"])
def test_causal_layers_take_a_causal_mask_or_none(attention):
    layer, x = built(attention=attention, causal=True), torch.randn(B, N, D)
    padding = ~real_tokens()
    y, _ = layer(x, x, x, padding)
    assert_close(layer(x, x, x, padding, attn_mask=FUTURE, is_causal=True)[0], y)
    assert_close(layer(x, x, x, padding, is_causal=True)[0], y)
    assert_close(layer(x[:, :4], key_padding_mask=padding[:, :4])[0], y[:, :4])
    with pytest.raises(ValueError, match="more than padding under a causal mask"):
        layer(x, x, x, attn_mask=FUTURE.T)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_inside_a_transformer_encoder(norm_first, num_layers):
    """It trains, evaluates without the fused path, and does not read padding."""
    model = nn.TransformerEncoderLayer(
        D, H, 17, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model.self_attn = PrimalMultiheadAttention(D, H, batch_first=True)
    if num_layers:
        model = nn.TransformerEncoder(model, num_layers, enable_nested_tensor=False)
    x, real = torch.randn(B, N, D), real_tokens()
    y = model(x, src_key_padding_mask=~real)
    (y[real].square().mean() + ksvd_loss(model)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), 1e-3).step()
    y = model(x, src_key_padding_mask=~real)
    model.eval()
    filled = torch.where(real[..., None], x, 1e3)
    with torch.no_grad():
        assert_close(model(filled, src_key_padding_mask=~real)[real], y[real])


def test_a_causal_encoder_layer_and_a_decoder_layer():
    layer = nn.TransformerEncoderLayer(D, H, 17, batch_first=True)
    layer.self_attn = built(causal=True)
    x, real = torch.randn(B, N, D), real_tokens()
    layer.eval()
    y = layer(x, src_mask=FUTURE, src_key_padding_mask=~real, is_causal=True)
    assert_close(layer(x[:, :4], is_causal=True), y[:, :4])
    decoder = nn.TransformerDecoderLayer(D, H, 17, batch_first=True).eval()
    decoder.self_attn, decoder.multihead_attn = built(causal=True), built()
    future = nn.Transformer.generate_square_subsequent_mask(5)
    y = decoder(x[:, :5], x, tgt_mask=future, memory_key_padding_mask=~real)
    assert_close(decoder(x[:, :3], x, memory_key_padding_mask=~real), y[:, :3])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_contract_holds(causal):
    check_attention(adapt(built(causal=causal), "mha", causal=causal), causal=causal)


@torch.no_grad()
def test_copies_files_devices_and_graphs():
    layer, x, real = built(), torch.randn(B, N, D), real_tokens()
    y, _ = layer(x, key_padding_mask=~real)
    assert torch.equal(copy.deepcopy(layer)(x, key_padding_mask=~real)[0], y)
    other = built(device="meta")
    assert {parameter.device.type for parameter in other.parameters()} == {"meta"}
    assert other(x.to("meta"))[0].shape == x.shape
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x, key_padding_mask=~real)[0], y)
    assert built(dtype=torch.float64)(x.double())[0].dtype == torch.float64
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(compiled(x, x, x, key_padding_mask=~real)[0], y)
    assert not any("bias" in name for name, _ in built(bias=False).named_parameters())
    assert built(dropout=0.25).mechanism.dropout == 0.25


def test_a_layer_built_directly_is_no_patched_layer():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, H, 17, batch_first=True), 2, enable_nested_tensor=False
    )
    mine = model.layers[0].self_attn = built()
    assert len(plan(model).layers) == 1
    patch(model, layers="all")
    assert type(model.layers[1].self_attn) is PrimalMultiheadAttention
    unpatch(model)
    assert model.layers[0].self_attn is mine
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention


def test_what_cannot_be_honoured_is_refused():
    layer, x = built(), torch.randn(B, N, D)
    refused = [
        ({"need_weights": True}, "need_weights=True"),
        ({"attn_mask": FUTURE}, "built or patched with causal=True"),
        ({"attn_mask": torch.randn(N, N)}, "adds numbers to the scores"),
        ({"is_causal": True}, "is_causal=True: this layer is not causal"),
        ({"key": x, "value": x + 1}, "value must be the tensor passed as key"),
        ({"key": x[0]}, "query and key must both have 2 dimensions"),
        ({"key_padding_mask": torch.randn(B, N)}, "adds numbers to the scores"),
        ({"key_padding_mask": torch.ones(B, N).long()}, "key_padding_mask must be bool"),
        ({"key_padding_mask": ~real_tokens()[:, :3]}, "key_padding_mask must be"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            layer(x, **arguments)
    with pytest.raises(ValueError, match="no cross-attention"):
        built(attention="nystrom")(x, x + 1)
    with pytest.raises(ValueError, match="sums over all queries"):
        built(attention="flow")(x, x + 1)
    with pytest.raises(ValueError, match="attention must be"):
        built(attention="nothing")
    with pytest.raises(TypeError, match="primal has no option 'kdim'"):
        built(kdim=3)
