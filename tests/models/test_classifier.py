"""Heads, masks and every mechanism of the registry in a classifier."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.attention import ATTENTIONS
from primal_attention.models import MODELS, Embedding, SequenceClassifier

from .small import (
    CHANNELS,
    MASK,
    B,
    D,
    K,
    N,
    classifier,
    embedding,
    encoder,
    gradients,
    randomise,
    symbols,
    tower,
    vectors,
)

POOLINGS = ["mean", "class_token", "flatten", "adaptive"]
poolings = pytest.mark.parametrize("pooling", POOLINGS)


def outputs_of(model, x, mask):
    """What the encoder of a classifier gives to its pooling."""
    return model.tower.encoder(model.tower.embedding(x), token_mask=mask)


def test_mean_is_over_the_real_tokens():
    model, x = randomise(classifier().double().eval()), vectors()
    y = outputs_of(model, x, MASK)
    expected = torch.stack([y[i, MASK[i]].mean(0) for i in range(B)])
    torch.testing.assert_close(model.tower(x, token_mask=MASK), expected)
    torch.testing.assert_close(model(x, token_mask=MASK), model.head(expected))
    torch.testing.assert_close(model.tower(x), outputs_of(model, x, None).mean(1))


def test_flatten_puts_the_activated_outputs_side_by_side():
    model, x = randomise(classifier(pooling="flatten").double().eval()), vectors(length=7)
    mask = MASK[:, :7]
    y = F.gelu(outputs_of(model, x, mask)) * mask[..., None]
    expected = torch.zeros(B, N * D, dtype=torch.float64)
    for t in range(7):
        expected[:, t * D : (t + 1) * D] = y[:, t]
    torch.testing.assert_close(model.tower(x, token_mask=mask), expected)
    assert model(x, token_mask=mask).shape == (B, K)


def test_adaptive_weights_are_a_softmax_over_the_real_tokens():
    model, x = classifier(pooling="adaptive").double().eval(), vectors()
    mean = classifier().double().eval()
    mean.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(x, token_mask=MASK), mean(x, token_mask=MASK))
    y, importance = outputs_of(model, x, MASK), randomise(model.tower.importance)
    weights = importance(y)[..., 0].masked_fill(~MASK, -torch.inf).softmax(1)
    logits = model.head(y)  # the mean of logits is the logit of the mean
    expected = torch.einsum("bn,bnk->bk", weights, logits)
    torch.testing.assert_close(model(x, token_mask=MASK), expected)
    nothing = torch.zeros_like(MASK)
    assert model(x, token_mask=nothing).isfinite().all()


def test_a_stride_makes_one_token_of_some_steps():
    torch.manual_seed(0)
    tokens = Embedding(D, N, num_channels=CHANNELS, kernel_size=3, stride=4).double()
    model = SequenceClassifier(tokens, encoder(), K).double().eval()
    x, mask = vectors(), torch.arange(N) < torch.tensor([[N], [5], [1]])
    assert tokens(x).shape == (B, 3, D)
    kernel = tokens.tokens.conv
    third = F.pad(x, (0, 0, 0, 1))[:, 7:10].mT.flatten(1) @ kernel.weight.flatten(1).mT
    expected = (third + kernel.bias) * tokens.scale + tokens.positions[2]
    torch.testing.assert_close(tokens(x)[:, 2], expected)
    logits = model(x, token_mask=mask)
    alone = model(x[1:2, :5], token_mask=mask[1:2, :5])
    torch.testing.assert_close(logits[1:2], alone)
    with pytest.raises(ValueError, match="stride=2 is of vectors"):
        Embedding(D, N, vocab_size=7, stride=2)


def test_class_token_is_read_where_it_stands():
    model, x = randomise(classifier(pooling="class_token").double().eval()), vectors()
    part = model.tower
    first = part.class_token.expand(B, 1, D)
    mask = torch.cat([torch.ones(B, 1, dtype=torch.bool), MASK], dim=1)
    y = part.encoder(torch.cat([first, part.embedding(x)], dim=1), token_mask=mask)
    torch.testing.assert_close(model.tower(x, token_mask=MASK), y[:, 0])


@poolings
@pytest.mark.parametrize("name", ["primalformer", "primal_plus", "softmax"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_padding_holds_is_never_seen(pooling, name, poison):
    model = randomise(classifier(name, pooling=pooling).double())
    clean = vectors()
    poisoned = torch.where(MASK[..., None], clean, poison)
    results = []
    for x in (clean, poisoned):
        x = x.clone().requires_grad_()
        logits = model(x, token_mask=MASK)
        results.append((logits, gradients(model, logits.square().sum()), x.grad))
    (logits, by_name, d_x), (logits_2, by_name_2, d_x_2) = results
    assert torch.equal(logits, logits_2)
    assert by_name.keys() == by_name_2.keys()
    assert all(torch.equal(by_name[name], by_name_2[name]) for name in by_name)
    assert torch.equal(d_x, d_x_2)
    assert not d_x[~MASK].any()


@poolings
def test_symbols_at_padding_are_never_seen(pooling):
    model = classifier(pooling=pooling, of_symbols=True).double().eval()
    ids = symbols()
    poisoned = torch.where(MASK, ids, -(10**9))
    assert torch.equal(model(ids, token_mask=MASK), model(poisoned, token_mask=MASK))


@given(length=st.integers(1, N), more=st.integers(0, 5), pooling=st.sampled_from(POOLINGS))
@settings(max_examples=40, deadline=None)
def test_more_padding_changes_nothing(length, more, pooling):
    torch.manual_seed(length)
    more = min(more, N - length)
    model = randomise(classifier(pooling=pooling).double().eval())
    x = vectors(length=length)
    longer = F.pad(x, (0, 0, 0, more), value=float("nan"))
    mask = F.pad(torch.ones(B, length, dtype=torch.bool), (0, more))
    torch.testing.assert_close(model(longer, token_mask=mask), model(x), rtol=1e-10, atol=1e-10)


@poolings
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_nothing_but_padding_is_finite(pooling, name):
    model = classifier(name, pooling=pooling)
    mask = MASK.clone()
    mask[1] = False
    logits = model(vectors().float(), token_mask=mask)
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(model, logits.sum()).values())


@poolings
def test_without_a_mask_in_attention_only_the_outputs_are_masked(pooling):
    model = randomise(classifier(pooling=pooling, mask_attention=False).double().eval())
    masked = randomise(classifier(pooling=pooling).double().eval())
    masked.load_state_dict(model.state_dict())
    x = vectors()
    logits = model(x, token_mask=MASK)
    assert not torch.allclose(logits, masked(x, token_mask=MASK))
    if pooling == "class_token":
        return torch.testing.assert_close(logits, model(x))
    y = outputs_of(model, x, None)
    if pooling == "mean":
        pooled = torch.stack([y[i, MASK[i]].mean(0) for i in range(B)])
    elif pooling == "adaptive":
        scores = model.tower.importance(y).masked_fill(~MASK[..., None], -torch.inf)
        pooled = (scores.softmax(1) * y).sum(1)
    else:
        pooled = (F.gelu(y) * MASK[..., None]).flatten(1)
    torch.testing.assert_close(logits, model.head(pooled))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_from_a_batch_with_padding(name):
    torch.manual_seed(0)
    model = classifier(name, dropout=0.1)
    target = torch.tensor([0, 3, 4])
    loss = F.cross_entropy(model(vectors().float(), token_mask=MASK), target)
    by_name = gradients(model, loss)
    # Lambda is for the objective alone; hashes and samples have no gradient
    missing = {name for name, _ in model.named_parameters()} - by_name.keys()
    assert all(name.endswith("raw_lambda") for name in missing), missing
    assert all(grad.isfinite().all() for grad in by_name.values())
    assert by_name["tower.embedding.tokens.weight"].any()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_sees_no_padding(name):
    torch.manual_seed(0)
    model = classifier(name).double().eval()
    poisoned = torch.where(MASK[..., None], vectors(), float("nan"))
    assert torch.equal(model(vectors(), token_mask=MASK), model(poisoned, token_mask=MASK))


@poolings
@pytest.mark.parametrize("name", ["primalformer", "primal_plus", "softmax"])
def test_bf16_autocast_is_near_float32(pooling, name):
    torch.manual_seed(0)
    model, x = classifier(name, pooling=pooling).eval(), vectors().float()
    exact = model(x, token_mask=MASK)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x, token_mask=MASK)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_a_mean_of_half_precision_does_not_overflow():
    model = tower("softmax").half()
    long = torch.full((1, 70_001, D), 3.0, dtype=torch.float16)
    model.embedding, model.encoder.blocks = torch.nn.Identity(), torch.nn.ModuleList()
    model.encoder.final_norm = torch.nn.Identity()
    mask = torch.ones(1, 70_001, dtype=torch.bool)
    assert torch.equal(model(long, token_mask=mask), torch.full((1, D), 3.0, dtype=torch.float16))


def test_dropout_is_for_training_alone():
    model, x = classifier(dropout=0.3).eval(), vectors().float()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@poolings
def test_dropout_reaches_tokens_and_features(pooling):
    part, seen = tower("softmax", pooling=pooling, dropout=1 - 1e-9).train(), []
    part.encoder.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    assert not part(vectors().float()).any()
    assert not seen[0][:, -N:].any()


def test_registry_is_covered():
    assert len(MODELS) == len(ATTENTIONS) + 2  # either Primal layer is in all layers or the last


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"pooling must be one of .*got 'max'"):
        SequenceClassifier(embedding(), encoder(), K, pooling="max")
    with pytest.raises(ValueError, match="pooling='flatten' needs num_tokens"):
        SequenceClassifier(embedding(), encoder(), K, pooling="flatten")
    with pytest.raises(ValueError, match="num_outputs must be a positive integer, got 0"):
        SequenceClassifier(embedding(), encoder(), 0)
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1, got 2"):
        SequenceClassifier(embedding(), encoder(), K, dropout=2.0)
    model, x = classifier(), vectors().float()
    with pytest.raises(ValueError, match="token_mask must be a bool tensor"):
        model(x, token_mask=MASK.long())
    with pytest.raises(ValueError, match=r"token_mask must have shape \[3, 11\]"):
        model(x, token_mask=MASK[:, :4])
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 7\]"):
        model(x[..., 1:])
    longer = tower(pooling="flatten")
    longer.num_tokens = 5
    with pytest.raises(ValueError, match="x has 11 tokens; the head is made for 5"):
        longer(torch.zeros(B, N, CHANNELS))
