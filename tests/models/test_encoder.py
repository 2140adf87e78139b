"""Blocks and stacks against the formulas written out."""

import pytest
import torch
import torch.nn.functional as F

from primal_attention.models import (
    Embedding,
    Encoder,
    EncoderBlock,
    SequenceClassifier,
    build_attentions,
)

from .small import CHANNELS, FFN, MASK, B, D, H, N, V, encoder, randomise, symbols, vectors


def layer_norm(norm, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def feed_forward(block, x, activation):
    hidden = activation(x @ block.ffn_in.weight.T + block.ffn_in.bias)
    return hidden @ block.ffn_out.weight.T + block.ffn_out.bias


def pre_norm(block, x, mask, activation):
    x = x + block.attention(layer_norm(block.attention_norm, x), token_mask=mask)
    return x + feed_forward(block, layer_norm(block.ffn_norm, x), activation)


def post_norm(block, x, mask, activation):
    x = layer_norm(block.attention_norm, x + block.attention(x, token_mask=mask))
    return layer_norm(block.ffn_norm, x + feed_forward(block, x, activation))


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("activation", [F.gelu, F.relu])
@pytest.mark.parametrize("form", [pre_norm, post_norm])
@pytest.mark.parametrize("mask", [None, MASK])
def test_a_stack_is_its_blocks_and_a_last_norm(form, activation, mask):
    norm = form.__name__.removesuffix("_norm")
    attentions = build_attentions("primal_plus", 2, D, H)
    stack = Encoder(attentions, D, FFN, norm=norm, activation=activation.__name__)
    randomise(stack.double().eval())
    expected = x = tokens()
    for block in stack.blocks:
        expected = form(block, expected, mask, activation)
    expected = layer_norm(stack.final_norm, expected)
    real = torch.ones(B, N, dtype=torch.bool) if mask is None else mask
    actual = stack(x, token_mask=mask)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_is_for_training_alone_and_keeps_the_mean(norm):
    stack = encoder("softmax", norm=norm, dropout=0.5).double()
    still = encoder("softmax", norm=norm).double()
    still.load_state_dict(stack.state_dict())
    x = tokens()
    assert torch.equal(stack.eval()(x), still.train()(x))
    assert not torch.equal(stack.train()(x), stack(x))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_reaches_both_branches(norm):
    """With all that a branch adds dropped, nothing but x and its norms are left."""
    (attention,) = build_attentions("softmax", 1, D, H)
    block = EncoderBlock(attention, D, FFN, norm=norm, dropout=1 - 1e-9).train()
    x = torch.randn(B, N, D)
    expected = x if norm == "pre" else block.ffn_norm(block.attention_norm(x))
    assert torch.equal(block(x), expected)


def test_dropout_reaches_the_hidden_layer():
    """Where each of 13 hidden units adds 1, what is added is more than all or nothing."""
    (attention,) = build_attentions("softmax", 1, D, H)
    block = EncoderBlock(attention, D, FFN, activation="relu", dropout=0.5).train()
    with torch.no_grad():
        for parameter in (*block.ffn_in.parameters(), *block.attention.out_proj.parameters()):
            parameter.zero_()
        block.ffn_in.bias.fill_(1.0)
        block.ffn_out.weight.fill_(1.0)
        block.ffn_out.bias.zero_()
    added = block(torch.zeros(B, N, D))
    assert len(added.unique()) > 3


def test_bad_options_are_named():
    (attention,) = build_attentions("softmax", 1, D, H)
    with pytest.raises(ValueError, match="norm must be one of 'pre', 'post', got 'batch'"):
        EncoderBlock(attention, D, FFN, norm="batch")
    with pytest.raises(ValueError, match=r"activation must be one of .* got 'tanh'"):
        EncoderBlock(attention, D, FFN, activation="tanh")
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1, got 1"):
        EncoderBlock(attention, D, FFN, dropout=1.0)
    with pytest.raises(ValueError, match="ffn_dim must be a positive integer, got 0"):
        EncoderBlock(attention, D, 0)
    with pytest.raises(ValueError, match="attentions is empty"):
        Encoder([], D, FFN)


def test_vectors_are_mapped_scaled_and_placed():
    embedding = Embedding(D, N, num_channels=CHANNELS).double()
    x = vectors(length=5)
    linear = x @ embedding.tokens.weight.T + embedding.tokens.bias
    expected = linear * D**0.5 + embedding.positions[:5]
    torch.testing.assert_close(embedding(x), expected)


def test_symbols_are_looked_up_and_placed():
    embedding, ids = Embedding(D, N, vocab_size=V), symbols()
    assert torch.equal(embedding(ids), embedding.tokens.weight[ids] + embedding.positions)


def test_positions_start_in_their_range():
    positions = Embedding(D, 1009, num_channels=CHANNELS, init_range=0.5).positions
    assert 0.49 < positions.abs().max() <= 0.5


def test_bad_tokens_are_named():
    with pytest.raises(ValueError, match=r"give num_channels .* or vocab_size"):
        Embedding(D, N)
    with pytest.raises(ValueError, match="num_channels=7, vocab_size=17"):
        Embedding(D, N, num_channels=CHANNELS, vocab_size=V)
    of_vectors, of_symbols = Embedding(D, N, num_channels=CHANNELS), Embedding(D, N, vocab_size=V)
    with pytest.raises(ValueError, match="x has 12 tokens; the model has positions for 11"):
        of_symbols(symbols(length=N + 1))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 7\], got \[3, 11\]"):
        of_vectors(symbols())
    with pytest.raises(ValueError, match=r"x must be integers .*float64 \[3, 11, 7\]"):
        of_symbols(vectors())


def test_the_embedding_reads_neighbours():
    embedding = Embedding(D, N, num_channels=CHANNELS, kernel_size=3).double()
    x = torch.randn(2, N, CHANNELS, dtype=torch.float64)
    weight, bias = embedding.tokens.conv.weight, embedding.tokens.conv.bias
    around = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)  # zeros beyond the ends
    expected = torch.einsum("bnck,dck->bnd", around, weight) + bias
    expected = expected * D**0.5 + embedding.positions
    torch.testing.assert_close(embedding(x), expected)
    with pytest.raises(ValueError, match="kernel_size must be odd and positive, got 4"):
        Embedding(D, N, num_channels=CHANNELS, kernel_size=4)


def test_padding_does_not_reach_real_tokens_through_the_embedding():
    embedding = Embedding(D, N, num_channels=CHANNELS, kernel_size=5).double()
    encoder = Encoder(build_attentions("primalformer", 1, D, H), D, 2 * D).double()
    model = SequenceClassifier(embedding, encoder, 3).double().eval()
    x = torch.randn(1, N, CHANNELS, dtype=torch.float64)
    mask = torch.arange(N) < N - 3
    short = model(x[:, : N - 3])
    x[:, N - 3 :] = float("nan")
    torch.testing.assert_close(model(x, token_mask=mask[None]), short)
