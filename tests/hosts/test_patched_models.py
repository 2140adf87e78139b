"""What transformers tests of its own models, in short: with every model patched as it is built."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    ViTConfig,
    ViTForImageClassification,
)

from primal_attention.patching.sites import patched_layers

from .patched_models import LAYERS, every_model_patched

SIZES = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2}
TEXT = SIZES | {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
CONFIGS = {
    "bert": BertConfig(**TEXT, intermediate_size=17, is_decoder=True),
    "gpt2": GPT2Config(**TEXT),
    "llama": LlamaConfig(**TEXT, intermediate_size=17, num_key_value_heads=2),
}


@pytest.fixture(params=LAYERS)
def number(request):
    """How many layers are patched in the models that the test builds."""
    with every_model_patched(LAYERS[request.param]):
        yield 1 if request.param == "-1" else 2


def build(name):
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_saved_and_loaded(name, number, tmp_path):
    model, tokens = build(name), torch.randint(3, 31, (2, 7))
    assert len(patched_layers(model)) == number
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in saved.items())
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    assert len(patched_layers(AutoModel.from_config(model.config))) == number


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_all_outputs_of_generation(name, cache, number):
    model, tokens = build(name), torch.randint(3, 31, (2, 7))
    out = model.generate(
        tokens,
        max_new_tokens=4,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert out.sequences.shape == (2, 11)
    num_keys = [10] * 4 if cache == "static" else [7, 8, 9, 10]
    for step, keys in zip(out.attentions, num_keys, strict=True):
        assert [each.shape[0] for each in step] == [2, 2]
        assert [each.shape[1:] for each in step] == [
            (6, 7 if step is out.attentions[0] else 1, keys)
        ] * 2
    assert [weights.is_meta for weights in out.attentions[0]] == [number == 2, True]
    heads = 2 if name == "llama" else 6
    assert [layer.keys.shape for layer in out.past_key_values.layers] == [(2, heads, 10, 4)] * 2


def test_images(number):
    config = ViTConfig(**SIZES, intermediate_size=17, image_size=12, patch_size=4)
    model = ViTForImageClassification._from_config(config, attn_implementation="eager")
    out = model(torch.randn(2, 3, 12, 12), output_attentions=True)
    assert len(patched_layers(model)) == number
    assert [weights.shape for weights in out.attentions] == [(2, 6, 10, 10)] * 2
    out.logits.sum().backward()
