"""Models built from the same modules come along: softmax in its own place changes nothing."""

import pytest
import torch

from primal_attention import patch
from primal_attention.patching.sites import patched_layers

from .families import IDS, SIZES, TEXT, VOCABULARY, B, N, assert_close, ids, real_tokens

SOUNDS = {
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "pronunciation_embed_dim": 5,
    "shape_embed_dim": 5,
}
ENCODERS = {
    "BertGenerationEncoder": {},
    "CamembertModel": {},
    "Data2VecTextModel": {},
    "ErnieModel": {},
    "RoCBertModel": SOUNDS,
    "RobertaPreLayerNormModel": {},
    "XLMRobertaModel": {},
    "XmodModel": {"languages": ["en"], "default_language": "en"},
}
DECODERS = {
    "ArceeForCausalLM": {},
    "GemmaForCausalLM": {"head_dim": 4},
    "HeliumForCausalLM": {"head_dim": 4},
    "MistralForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {"sliding_window": None, "num_local_experts": 2, "intermediate_size": 16},
    "Qwen2ForCausalLM": {},
}
IMAGES = ("ViTMAEModel", "ViTMSNModel", "IJepaModel")


def build(name, **sizes):
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_texts(name):
    grouped = {**IDS, "num_key_value_heads": 2} if name in DECODERS else {}
    model = build(name, **TEXT | grouped | (ENCODERS | DECODERS)[name])
    tokens, mask = ids(), real_tokens()
    y = model(tokens, attention_mask=mask.long())[0]
    patch(model, "softmax", "all")
    assert len(patched_layers(model)) == 2
    assert_close(model(tokens, attention_mask=mask.long())[0][mask], y[mask])


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGES)
def test_images(name):
    model = build(name, **SIZES, image_size=12, patch_size=4)
    inputs = {"pixel_values": torch.randn(B, 3, 12, 12)}
    if name == "ViTMAEModel":
        inputs["noise"] = torch.rand(B, 9)
    y = model(**inputs)[0]
    assert_close(patch(model, "softmax", "all")(**inputs)[0], y)


@torch.no_grad()
def test_sounds():
    sizes = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4}
    model = build("ASTModel", **SIZES, **sizes, max_length=4 * N, num_mel_bins=16)
    x = torch.randn(B, 4 * N, 16)
    y = model(x)[0]
    assert_close(patch(model, "softmax", "all")(x)[0], y)
