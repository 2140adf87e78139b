"""Softmax attention of foreign models: the matrices are those that the hosts attend with."""

import pytest
import torch
from torch import nn

from primal_attention import patch
from primal_attention.analysis import attention_matrices, spectrum

from ..patching.families import FAMILIES, B, real_tokens

PRINTED = [  # hosts that hand out their attention matrices
    "bert",
    "bert_decoder",
    "distilbert",
    "albert",
    "vit",
    "gpt2",
    "llama",
    "qwen3",
    "granite",
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


class Padded(nn.Module):
    """A model of a family, called with tokens and the mask of the real ones."""

    def __init__(self, family):
        super().__init__()
        self.family, self.model = family, family.model()

    def forward(self, tokens, mask):
        return self.family.run(self.model, tokens, mask)


@pytest.mark.parametrize("name", PRINTED)
def test_matrices_are_those_of_the_host(name, monkeypatch):
    family = FAMILIES[name]
    padded, tokens, mask = Padded(family), family.tokens(), real_tokens()
    padded.model.set_attn_implementation("eager")
    padded.model.config.output_attentions = True
    printed = []
    call = type(padded.model).forward

    def forward(*args, **kwargs):
        outputs = call(*args, **kwargs)
        printed.extend(outputs.attentions)
        return outputs

    monkeypatch.setattr(type(padded.model), "forward", forward)
    found = [heads.dense() for _, heads in attention_matrices(padded, (tokens, mask))]
    real = mask if family.pads else torch.ones(B, printed[0].shape[-1], dtype=torch.bool)
    expected = [layer[b][:, real[b]][:, :, real[b]] for layer in printed for b in range(B)]
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(PRINTED)))
def test_every_other_family_is_heard(name):
    family = FAMILIES[name]
    padded, mask = Padded(family), real_tokens()
    tokens = family.tokens()
    before = family.run(padded.model, tokens, mask)
    found = spectrum(padded, [(tokens, mask)])
    assert all(layer.attention == "softmax" for layer in found.layers)
    assert all(layer.entropy.mean > 0 for layer in found.layers)
    after = family.run(padded.model, tokens, mask)
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_cross_attention_is_not_compared_with_its_transpose():
    padded = Padded(FAMILIES["torch_decoder"])
    found = spectrum(padded, (torch.randn(B, 7, 24), real_tokens()))
    for layer in found.layers:
        assert (layer.asymmetry.mean != layer.asymmetry.mean) == ("multihead" in layer.name)


def test_the_fast_path_of_torch_is_not_taken_while_listening():
    layer = nn.TransformerEncoderLayer(24, 6, 17, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(B, 7, 24), real_tokens()
    found = spectrum(encoder, {"src": x, "src_key_padding_mask": ~mask})
    assert [one.num_tokens.mean for one in found.layers] == [5.5, 5.5]
    assert encoder.use_nested_tensor, "as it was"


def test_timm():
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=12, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=3
    )
    found = spectrum(model, torch.randn(B, 3, 12, 12))
    assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert [layer.num_tokens.mean for layer in found.layers] == [10, 10]


def test_a_model_that_is_patched_in_part():
    padded = Padded(FAMILIES["bert"])
    patch(padded.model, "primal", layers=-1, num_directions=3)
    found = spectrum(padded, (FAMILIES["bert"].tokens(), real_tokens()))
    assert [layer.attention for layer in found.layers] == ["softmax", "primal"]
    assert found[1].name == "model.encoder.layer.1.attention.self"
    assert len(found[1].explained) <= 4, "a head has four features"


def test_a_patched_model_with_rotary_positions():
    padded = Padded(FAMILIES["llama"])
    patch(padded.model, "primal", layers=0, num_directions=3, weights="dual")
    patch(padded.model, "softmax", layers=1)
    plain = Padded(FAMILIES["llama"])
    batch = FAMILIES["llama"].tokens(), real_tokens()
    found, before = spectrum(padded, batch), spectrum(plain, batch)
    assert [layer.attention for layer in found.layers] == ["primal", "softmax"]
    assert [layer.name for layer in found.layers] == [layer.name for layer in before.layers]
    assert found[1].num_matrices == before[1].num_matrices


def test_patching_with_softmax_changes_no_spectrum():
    """The layers decode from a cache by default, and are heard all the same."""
    plain, padded = Padded(FAMILIES["llama"]), Padded(FAMILIES["llama"])
    patch(padded.model, "softmax", layers="all")
    batch = FAMILIES["llama"].tokens(), real_tokens()
    for mine, its in zip(
        spectrum(padded, batch).layers, spectrum(plain, batch).layers, strict=True
    ):
        torch.testing.assert_close(mine.explained, its.explained, rtol=1e-4, atol=1e-5)
        assert mine.entropy.mean == pytest.approx(its.entropy.mean, rel=1e-4)


def test_a_model_without_attention_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="Linear has no attention"):
        spectrum(nn.Linear(2, 2), torch.randn(1, 3, 2))
