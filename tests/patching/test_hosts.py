"""Families of transformers by a table: taken over, padded, generating, saved and undone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from primal_attention import patch, unpatch
from primal_attention.patching import load_patched
from primal_attention.patching.sites import patched_layers

from .families import (
    IDS,
    SIZES,
    TEXT,
    VOCABULARY,
    B,
    D,
    H,
    N,
    assert_close,
    ids,
    other,
    real_tokens,
)
from .test_generation import generate, longer

WIDE = {"num_key_value_heads": 2, "head_dim": 6}  # heads of 36 channels in a model of 24
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SCALED = {"query_pre_attn_scalar": 10}
MODERN = {"global_attn_every_n_layers": 2, "local_attention": 4, "attention_dropout": 0.0}
NEOX = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1}}
SPEECH = {
    "conv_dim": [8],
    "conv_stride": [4],
    "conv_kernel": [4],
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
TWO_SIDES = {
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 17,
    "init_std": 0.3,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
WHISPER = TWO_SIDES | {"num_mel_bins": 8, "max_source_positions": N, "max_target_positions": 40}
SEEN = SIZES | {"image_size": 12, "patch_size": 4}


def vectors() -> torch.Tensor:
    return torch.randn(B, N, D)


def run_text(model, x, mask):
    return model(input_ids=x, attention_mask=mask.long())[0]


def run_encoder(model, x, mask):
    return model.get_encoder()(input_ids=x, attention_mask=mask.long())[0]


def run_speech(model, x, mask):
    """Without the convolutions before, whose norm is over the padding too."""
    return model.encoder(x.masked_fill(~mask[..., None], 0.0), attention_mask=mask)[0]


def run_spectrogram(model, x, mask):
    return model.get_encoder()(x)[0]


def run_image(model, x, mask):
    return model(pixel_values=x)[0]


class Case(NamedTuple):
    kind: str
    sizes: dict[str, Any]
    run: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = run_text
    inputs: Callable[[], torch.Tensor] = ids
    pads: bool = True
    layers: Any = "all"
    patched: int = 2  # layers

    def model(self) -> Any:
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.kind)
        return kind(kind.config_class(**self.sizes)).eval()


def images() -> torch.Tensor:
    return torch.randn(B, 3, 12, 12)


ENCODERS = {
    "modernbert": Case("ModernBertModel", TEXT | IDS | MODERN, patched=1),
    "whisper": Case(
        "WhisperModel",
        WHISPER,
        run_spectrogram,
        lambda: torch.randn(B, 8, 2 * N),
        pads=False,
        layers="encoder.*",
    ),
    "wav2vec2": Case("Wav2Vec2Model", SIZES | SPEECH, run_speech, vectors),
    "hubert": Case("HubertModel", SIZES | SPEECH, run_speech, vectors),
    "clip_vision": Case("CLIPVisionModel", SEEN, run_image, images, pads=False),
    "siglip_vision": Case(
        "SiglipVisionModel", SEEN, run_image, images, pads=False, layers="*layers*"
    ),
    "siglip_text": Case("SiglipTextModel", TEXT | IDS),
    "bart": Case("BartModel", TWO_SIDES, run_encoder, layers="encoder.*"),
    "marian": Case("MarianModel", TWO_SIDES, run_encoder, layers="encoder.*"),
}
DECODERS = {
    "phi3": Case("Phi3ForCausalLM", TEXT | IDS | {"num_key_value_heads": 2}),
    "gpt_neox": Case("GPTNeoXForCausalLM", TEXT | IDS | NEOX),
    "gemma2": Case("Gemma2ForCausalLM", TEXT | IDS | WIDE | WINDOWED | SCALED, patched=1),
    "gemma3": Case("Gemma3ForCausalLM", TEXT | IDS | WIDE | WINDOWED | SCALED, patched=1),
    "olmo2": Case("Olmo2ForCausalLM", TEXT | IDS | {"num_key_value_heads": 2}),
    "qwen3_wide": Case("Qwen3ForCausalLM", TEXT | IDS | WIDE),
    "qwen3_narrow": Case("Qwen3ForCausalLM", TEXT | IDS | WIDE | {"head_dim": 2}),
    "gemma_wide": Case("GemmaForCausalLM", TEXT | IDS | WIDE),
}
CLIP_TEXT = Case("CLIPTextModel", TEXT | IDS | {"eos_token_id": 2})
CASES = ENCODERS | DECODERS | {"clip_text": CLIP_TEXT}
PADDED = [name for name, case in CASES.items() if case.pads]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_softmax_in_place_of_softmax_changes_nothing_and_all_is_undone_bit_for_bit(name):
    case = CASES[name]
    model, x, mask = case.model(), case.inputs(), real_tokens()
    real = mask if case.pads else ...
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    y = case.run(model, x, mask)
    patch(model, "softmax", case.layers)
    assert len(patched_layers(model)) == case.patched
    assert_close(case.run(model, x, mask)[real], y[real])
    unpatch(model)
    patch(model, "linear", case.layers)
    assert not torch.allclose(case.run(model, x, mask)[real], y[real], atol=1e-4)
    for layer in patched_layers(model).values():
        for parameter in layer.parameters():
            parameter.add_(1.0)
    unpatch(model)
    restored = model.state_dict()
    assert list(restored) == list(weights)
    assert all(torch.equal(restored[key], weights[key]) for key in weights)
    assert torch.equal(case.run(model, x, mask), y)


@torch.no_grad()
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_as_if_it_were_not_there(name):
    case = CASES[name]
    model, x, mask = patch(case.model(), "primal", case.layers), case.inputs(), real_tokens()
    y = case.run(model, x, mask)
    assert_close(case.run(model, other(x, mask), mask)[mask], y[mask], 1e-6)
    if case.run is not run_speech:  # whose convolution over time is shorter at an end
        alone = case.run(model, x[1:, : N - 3], mask[1:, : N - 3])
        assert_close(y[1:, : N - 3], alone)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "flow"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_equals_the_full_pass(name, attention):
    case = DECODERS[name]
    model, tokens, mask = patch(case.model(), attention, case.layers), ids(), real_tokens(left=True)
    out = generate(model, tokens, mask, return_dict_in_generate=True, output_logits=True)
    whole = longer(mask)
    places = {"attention_mask": whole.long(), "position_ids": (whole.cumsum(1) - 1).clamp(min=0)}
    full = model(out.sequences[:, :-1], **places, use_cache=False).logits
    assert_close(torch.stack(out.logits, dim=1), full[:, N - 1 :])


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["BartForConditionalGeneration", "WhisperForConditionalGeneration"]
)
def test_decoders_of_two_sided_models_generate_with_their_cache(kind):
    bart = kind.startswith("Bart")
    model = Case(kind, TWO_SIDES if bart else WHISPER).model()
    patch(model, "linear", "*decoder.layers.*")
    assert all(layer.causal for layer in patched_layers(model).values())
    x = ids() if bart else torch.randn(B, 8, 2 * N)
    start = torch.randint(3, VOCABULARY, (B, 2))
    texts = [
        model.generate(x, decoder_input_ids=start, max_length=9, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert texts[0].shape[1] > 5
    assert torch.equal(*texts)


@torch.no_grad()
@pytest.mark.parametrize("name", ["modernbert", "phi3", "gpt_neox", "gemma3", "qwen3_wide"])
def test_saved_models_come_back(name, tmp_path):
    case = CASES[name]
    model, x, mask = patch(case.model(), "primal", case.layers), case.inputs(), real_tokens()
    model.save_pretrained(tmp_path)
    assert torch.equal(case.run(load_patched(tmp_path), x, mask), case.run(model, x, mask))


@pytest.mark.parametrize("name", ["qwen3_wide", "gemma3"])
def test_every_parameter_of_heads_of_any_size_learns(name):
    model = patch(DECODERS[name].model(), "primal", -1).train()
    run_text(model, ids(), real_tokens()).square().mean().backward()
    (layer,) = patched_layers(model).values()
    grads = {key: p.grad for key, p in layer.named_parameters() if "raw_lambda" not in key}
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads.values())


def test_sampled_weights_want_heads_that_slice_the_tokens():
    model = CASES["gemma_wide"].model()
    with pytest.raises(ValueError, match=r"36 channels in all.* 24; use weights='dual'"):
        patch(model, weights="sampled", causal=False)
    assert not patched_layers(model)


@pytest.mark.parametrize("name", ["modernbert", "gemma2", "gemma3"])
def test_a_layer_with_a_window_is_refused_by_number(name):
    model = CASES[name].model()
    local = next(i for i, kind in enumerate(model.config.layer_types) if "sliding" in kind)
    with pytest.raises(ValueError, match=r"a sliding window of .*layers='all' takes"):
        patch(model, "linear", local)
    assert not patched_layers(model)


REFUSED = {
    "T5EncoderModel": (
        {"d_model": D, "d_kv": 4, "num_heads": H, "d_ff": 17, "num_layers": 2, "vocab_size": 31},
        "bias of relative positions.*such as BART",
    ),
    "DebertaV2Model": (TEXT | {"relative_attention": True, "pos_att_type": "c2p|p2c"}, "distance"),
    "WavLMModel": (SIZES | SPEECH, "bias of relative positions.*HuBERT"),
    "SwinModel": (
        {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1], "num_heads": [2]}
        | {"window_size": 4},
        "within windows.*such as ViT",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by DeBERTa itself
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("layers", [-1, "all"])
def test_a_family_that_cannot_be_honoured_is_refused_with_the_reason(kind, layers):
    sizes, reason = REFUSED[kind]
    model = Case(kind, sizes).model()
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=f"{reason}.*register_host"):
        patch(model, "linear", layers)
    assert list(model.state_dict()) == before
