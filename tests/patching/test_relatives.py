"""Models built from the same modules come along.

Softmax in its own place changes nothing, padding is as if it were not there, and generation gives
what the full pass gives.
"""

import pytest
import torch

from primal_attention import patch
from primal_attention.patching.sites import patched_layers

from .families import IDS, SIZES, TEXT, VOCABULARY, B, N, assert_close, ids, other, real_tokens
from .test_generation import NEW, generate, longer

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
OF_BERT = {  # encoders as decoders, with a cache
    "BertGenerationDecoder": {},
    "CamembertForCausalLM": {},
    "Data2VecTextForCausalLM": {},
    "ElectraForCausalLM": {"embedding_size": 8},
    "ErnieForCausalLM": {},
    "RoCBertForCausalLM": SOUNDS,
    "RobertaForCausalLM": {},
    "RobertaPreLayerNormForCausalLM": {},
    "XLMRobertaForCausalLM": {},
    "XLMRobertaXLForCausalLM": {},
    "XmodForCausalLM": ENCODERS["XmodModel"],
}
IMAGES = ("ViTMAEModel", "ViTMSNModel", "IJepaModel")


def build(name, **sizes):
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval()


def build_text(name):
    more = {}
    if name in DECODERS:
        more = {**IDS, "num_key_value_heads": 2}
    elif name in OF_BERT:
        more = {**IDS, "is_decoder": True}
    torch.manual_seed(0)
    return build(name, **TEXT | more | (ENCODERS | DECODERS | OF_BERT)[name])


@torch.no_grad()
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *OF_BERT])
def test_texts(name):
    model = build_text(name)
    tokens, mask = ids(), real_tokens()
    y = model(tokens, attention_mask=mask.long())[0]
    patch(model, "softmax", "all")
    assert len(patched_layers(model)) == 2
    assert_close(model(tokens, attention_mask=mask.long())[0][mask], y[mask])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "linear"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *OF_BERT])
def test_padding_is_as_if_it_were_not_there(name, attention):
    model, tokens = patch(build_text(name), attention, "all"), ids()
    for mask in (real_tokens(left=True), real_tokens()):
        y = model(tokens, attention_mask=mask.long())[0]
        changed = model(other(tokens, mask), attention_mask=mask.long())[0]
        assert_close(changed[mask], y[mask], 1e-6)
    assert_close(y[1:, : N - 3], model(tokens[1:, : N - 3])[0])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "linear"])
@pytest.mark.parametrize("name", [*DECODERS, *OF_BERT])
def test_generation_equals_the_full_pass(name, attention):
    model, tokens, mask = patch(build_text(name), attention, "all"), ids(), real_tokens(left=True)
    out = generate(model, tokens, mask, return_dict_in_generate=True, output_logits=True)
    whole = longer(mask)
    places = {"attention_mask": whole.long(), "position_ids": (whole.cumsum(1) - 1).clamp(min=0)}
    full = model(out.sequences[:, :-1], **places, use_cache=False).logits
    assert_close(torch.stack(out.logits, dim=1), full[:, N - 1 :])
    assert out.sequences.shape == (B, N + NEW)


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
