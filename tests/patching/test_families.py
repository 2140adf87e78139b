"""Every family: what patching takes over, what it must not change, and that it can be undone."""

import pytest
import torch

from primal_attention import ATTENTIONS, patch, unpatch
from primal_attention.patching.sites import patched_layers

from .families import (
    FAMILIES,
    MECHANISMS,
    N,
    assert_close,
    bert,
    gpt2,
    ids,
    implementations,
    other,
    real_tokens,
)


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(params=[name for name, family in FAMILIES.items() if family.pads])
def padded(request):
    return FAMILIES[request.param]


@pytest.fixture(params=[name for name, family in FAMILIES.items() if family.causal])
def causal(request):
    return FAMILIES[request.param]


@torch.no_grad()
def test_softmax_in_place_of_softmax_changes_nothing(family):
    """So the projections, scales, rotations, groups and masks are those of the host."""
    model, tokens = family.model(), family.tokens()
    for _ in implementations(model):
        for mask in (real_tokens(), real_tokens(left=family.left)):
            real = mask if family.pads else ...
            expected = family.run(model, tokens, mask)[real]
            for layers in ("all", 0):
                patch(model, "softmax", layers)
                assert_close(family.run(model, tokens, mask)[real], expected)
                unpatch(model)


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
def test_padding_changes_nothing(padded, attention):
    model, tokens = patch(padded.model(), attention, padded.layers), padded.tokens()
    for left in (False, True):
        mask = real_tokens(left=left)
        y = padded.run(model, tokens, mask)[mask]
        assert_close(padded.run(model, other(tokens, mask), mask)[mask], y, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
def test_padding_is_as_if_it_were_not_there(padded, attention):
    model, tokens = patch(padded.model(), attention, padded.layers), padded.tokens()
    mask = real_tokens()
    alone = padded.run(model, tokens[1:, : N - 3], mask[1:, : N - 3])
    assert_close(padded.run(model, tokens, mask)[1:, : N - 3], alone)


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
def test_causal_hosts_stay_causal(causal, attention):
    model, tokens = patch(causal.model(), attention, causal.layers), causal.tokens()
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
    y = causal.run(model, tokens, mask)
    changed = torch.cat([tokens[:, :4], tokens[:, 4:].flip(1)], dim=1)
    z = causal.run(model, changed, mask)
    assert_close(z[:, :4], y[:, :4], 1e-6)
    assert not torch.allclose(z[:, 4:], y[:, 4:], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
def test_unpatch_restores_bit_for_bit(family, attention):
    model, tokens, mask = family.model(), family.tokens(), real_tokens()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    y = family.run(model, tokens, mask)
    patch(model, attention, family.layers)
    if attention != "softmax_bn":
        assert not torch.allclose(family.run(model, tokens, mask)[0], y[0], atol=1e-4)
    for layer in patched_layers(model).values():  # as training would
        for parameter in layer.parameters():
            parameter.add_(1.0)
    assert unpatch(model) is model
    assert not patched_layers(model)
    restored = model.state_dict()
    assert list(restored) == list(weights)
    assert all(torch.equal(restored[name], weights[name]) for name in weights)
    assert torch.equal(family.run(model, tokens, mask), y)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_mechanism_in_an_encoder(attention):
    model, tokens, mask = patch(bert(), attention), ids(), real_tokens()
    y = model(tokens, attention_mask=mask.long())[0]
    y[mask].square().sum().backward()
    assert y.isfinite().all()
    layer = model.encoder.layer[1].attention.self.mechanism
    assert isinstance(layer, ATTENTIONS[attention])
    assert layer.q_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_mechanism_in_a_decoder(attention):
    model = gpt2()
    if not ATTENTIONS[attention].mechanism.causal:
        with pytest.raises(ValueError, match="causal"):
            patch(model, attention)
        assert not patched_layers(model)
        return
    model = patch(model, attention).eval()
    assert model(ids()).logits.isfinite().all()
    assert model.transformer.h[1].attn.causal


def test_projections_are_taken_over():
    model = bert()
    attention = model.encoder.layer[1].attention
    host = {
        "q_proj": attention.self.query,
        "k_proj": attention.self.key,
        "out_proj": attention.output.dense,
    }
    patch(model, num_directions=5)
    layer = attention.self.mechanism
    for name, projection in host.items():
        assert torch.equal(getattr(layer, name).weight, projection.weight)
        assert torch.equal(getattr(layer, name).bias, projection.bias)
        assert getattr(layer, name).weight is not projection.weight
    assert not hasattr(layer, "v_proj")
    assert isinstance(attention.output.dense, torch.nn.Identity)


def test_attention_bn_starts_as_the_attention_of_the_host():
    model, tokens, mask = bert().eval(), ids(), real_tokens()
    y = model(tokens, attention_mask=mask.long())[0][mask]
    patch(model, "softmax_bn", "all")
    assert_close(model(tokens, attention_mask=mask.long())[0][mask], y)
    beta = model.encoder.layer[0].attention.self.mechanism.norm.beta
    assert beta.requires_grad
    unpatch(model)
    patch(model, "softmax_bn", "all", beta=1.0)
    assert not torch.allclose(model(tokens, attention_mask=mask.long())[0][mask], y, atol=1e-3)


def test_lengths_and_dropout_come_from_the_host():
    layer = patch(gpt2(resid_pdrop=0.2), "cosformer").transformer.h[1].attn.mechanism
    assert (layer.max_tokens, layer.dropout) == (40, 0.2)
    layer = patch(gpt2(), "cosformer", max_tokens=77).transformer.h[1].attn.mechanism
    assert layer.max_tokens == 77


def test_dtype_mode_and_frozen_weights_follow_the_host():
    model = bert().to(torch.bfloat16)
    model.encoder.layer[1].attention.self.query.requires_grad_(False)
    layer = patch(model.eval()).encoder.layer[1].attention.self
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert not layer.mechanism.training
    assert not layer.mechanism.q_proj.weight.requires_grad
    assert layer.mechanism.k_proj.weight.requires_grad
    model.float()
    unpatch(model.train())
    restored = model.encoder.layer[1].attention.self
    assert restored.training
    assert restored.query.weight.dtype == torch.float32


def test_nan_at_padding_reaches_no_real_token():
    model, mask = patch(bert(), "linear", "all").eval(), real_tokens()
    x = torch.randn(*mask.shape, model.config.hidden_size)
    y = model(inputs_embeds=x, attention_mask=mask.long())[0][mask]
    x[~mask] = float("nan")
    assert torch.equal(model(inputs_embeds=x, attention_mask=mask.long())[0][mask], y)
