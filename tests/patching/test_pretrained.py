"""Plain ``from_pretrained`` of transformers, after ``import primal_attention`` alone."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from primal_attention import patch
from primal_attention.models import PrimalFormerConfig, PrimalFormerForMaskedLM
from primal_attention.patching import load_patched, save_patched
from primal_attention.patching.sites import patched_layers

from .families import TEXT, bert, gpt2, ids

FIRST = "import primal_attention\nimport transformers\n"
LATER = "import transformers\ntransformers.BertModel\nimport primal_attention\n"
LOAD = """
import sys, torch
tokens, outputs = torch.load(sys.argv[1], weights_only=True), []
for one in sys.argv[3:]:
    kind, folder = one.split("=")
    outputs.append(getattr(transformers, kind).from_pretrained(folder)(tokens)[0])
torch.save(outputs, sys.argv[2])
"""


@torch.no_grad()
@pytest.mark.parametrize("imports", [FIRST, LATER])
def test_a_fresh_process_loads_by_any_class(tmp_path, imports):
    tokens = ids()
    patched = patch(bert().eval(), "primal", "all", num_directions=5)
    save_patched(patched, tmp_path / "patched")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1}
    primalformer = PrimalFormerForMaskedLM(PrimalFormerConfig(31, **sizes)).eval()
    primalformer.save_pretrained(tmp_path / "primalformer")
    expected = {
        "AutoModel=patched": patched,
        "BertModel=patched": patched,
        "AutoModel=primalformer": primalformer.model,
        "AutoModelForMaskedLM=primalformer": primalformer,
    }
    files = tmp_path / "tokens.pt", tmp_path / "outputs.pt"
    torch.save(tokens, files[0])
    words = [sys.executable, "-c", imports + LOAD, *files, *expected]
    subprocess.run(words, check=True, timeout=240, cwd=tmp_path)
    outputs = torch.load(files[1], weights_only=True)
    for y, model in zip(outputs, expected.values(), strict=True):
        assert torch.equal(y, model(tokens)[0])


@torch.no_grad()
def test_the_body_comes_without_its_head_and_gets_another(tmp_path):
    from transformers import AutoModel, BertConfig, BertForMaskedLM, BertForSequenceClassification

    model, tokens = patch(BertForMaskedLM(BertConfig(**TEXT)).eval(), num_directions=5), ids()
    model.save_pretrained(tmp_path / "whole")
    body = AutoModel.from_pretrained(tmp_path / "whole", add_pooling_layer=False)
    y = model.bert(tokens)[0]
    assert type(body).__name__ == "BertModel" and torch.equal(body(tokens)[0], y)
    body.save_pretrained(tmp_path / "body")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "body")
    assert torch.equal(again.bert(tokens)[0], y)
    assert list(patched_layers(again)) == list(patched_layers(model))
    assert torch.equal(load_patched(tmp_path / "body", type(body))(tokens)[0], y)


def test_tensors_that_are_missing_are_an_error(tmp_path):
    from transformers import AutoModel, BertModel

    patch(bert(), num_directions=5).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (lost,) = [name for name in tensors if name.endswith("w_e")]
    save_file({name: each for name, each in tensors.items() if name != lost}, path)
    for load in (AutoModel.from_pretrained, BertModel.from_pretrained, load_patched):
        with pytest.raises(ValueError, match=rf"lacks tensors of patched layers.*{lost}"):
            load(tmp_path)


def test_tensors_of_another_shape_are_an_error_even_if_ignored(tmp_path):
    from transformers import BertModel

    model = patch(bert(), num_directions=5)
    model.save_pretrained(tmp_path)
    model.config.primal_attention["layers"][0]["options"]["num_directions"] = 4
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks tensors of patched layers"):
        BertModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@torch.no_grad()
def test_options_and_unpatched_models_are_as_before(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    model, tokens = patch(gpt2().eval(), "linear"), ids()
    model.save_pretrained(tmp_path / "patched")
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path / "patched", output_loading_info=True)
    assert type(loaded) is GPT2LMHeadModel and not info["missing_keys"]
    options = {"attn_implementation": "eager", "dtype": torch.float64}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", **options)
    assert (loaded.dtype, loaded.config._attn_implementation) == (torch.float64, "eager")
    assert torch.allclose(loaded(tokens)[0].float(), model(tokens)[0], atol=1e-5)
    plain = gpt2().eval()
    plain.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not patched_layers(loaded) and torch.equal(loaded(tokens)[0], plain(tokens)[0])
    with pytest.raises(OSError, match="nowhere"):
        GPT2LMHeadModel.from_pretrained(tmp_path / "nowhere")


def test_a_class_without_the_patched_layer_is_an_error(tmp_path):
    from transformers import GPT2LMHeadModel

    patch(bert(), num_directions=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no attention at encoder\.layer\.1"):
        GPT2LMHeadModel.from_pretrained(tmp_path)
