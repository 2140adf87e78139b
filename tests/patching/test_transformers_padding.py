"""Models that are patched throughout hand the padding to their layers as it came."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from primal_attention import patch, unpatch
from primal_attention.patching import load_patched, save_patched

from .families import DECODERS, FAMILIES, assert_close, bert, bert_decoder, ids, llama, real_tokens

TEXTS = [name for name, family in FAMILIES.items() if family.tokens is ids]


def masks_seen(model, run):
    """The shapes of the masks that the patched layers get."""
    seen = []

    def look(module, args, kwargs):
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        seen.append(None if mask is None else mask.ndim)

    from primal_attention.patching.sites import patched_layers

    hooks = [
        layer.register_forward_pre_hook(look, with_kwargs=True)
        for layer in patched_layers(model).values()
    ]
    y = run()
    for hook in hooks:
        hook.remove()
    return y, set(seen)


@torch.no_grad()
@pytest.mark.parametrize("name", TEXTS)
def test_the_mask_has_two_dimensions_and_the_outputs_are_the_same(name):
    family = FAMILIES[name]
    model, tokens, mask = family.model(), family.tokens(), real_tokens(left=True)
    patch(model, "linear", "all")
    assert model.config._attn_implementation == "sdpa_padding"
    y, seen = masks_seen(model, lambda: family.run(model, tokens, mask))
    assert seen == {2}
    model.set_attn_implementation("eager")
    z, seen = masks_seen(model, lambda: family.run(model, tokens, mask))
    assert seen == {4}
    assert_close(y[mask], z[mask], 1e-6)


@pytest.mark.parametrize("name", DECODERS)
def test_only_where_all_are_patched(name):
    model = FAMILIES[name].model()
    assert patch(model, "linear", 0).config._attn_implementation == "sdpa"
    assert patch(model, "flow", 1).config._attn_implementation == "sdpa_padding"
    twin = copy.deepcopy(model)
    assert unpatch(model).config._attn_implementation == "sdpa"
    assert twin.config._attn_implementation == "sdpa_padding"


def test_not_beside_a_cross_attention():
    from transformers import BertConfig, BertLMHeadModel

    from .families import TEXT

    config = BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    model = patch(BertLMHeadModel(config).eval(), "linear", "all")
    assert model.config._attn_implementation == "sdpa"
    assert patch(bert_decoder(), "linear", "all").config._attn_implementation == "sdpa_padding"


def test_a_loaded_model_does_the_same_and_says_nothing_of_it(tmp_path):
    save_patched(patch(bert(), "linear", "all"), tmp_path)
    assert "_padding" not in (tmp_path / "config.json").read_text()
    assert load_patched(tmp_path).config._attn_implementation == "sdpa_padding"


@torch.no_grad()
def test_other_masks_are_still_refused():
    model, tokens = patch(llama().eval(), "linear", "all"), ids()
    with pytest.raises(ValueError, match="more than padding"):
        model(tokens, attention_mask=torch.ones(2, 1, 7, 7, dtype=torch.bool))


@pytest.mark.parametrize("name", [*TEXTS, "vit"])
def test_the_config_of_a_patched_model_builds_a_model(name):
    """One of the host, with the attention of the host: the config says nothing of the layers."""
    family = FAMILIES[name]
    before = family.model(seed=1)
    config = patch(family.model(), "linear", "all").config
    for each in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        torch.manual_seed(1)
        model = type(before)(each).eval()
        model.load_state_dict(before.state_dict())
        tokens = family.tokens()
        masks = [real_tokens(), real_tokens(left=True)] if family.pads else [real_tokens()]
        for mask in masks:
            y, z = (family.run(each, tokens, mask) for each in (model, before))
            real = (mask,) if family.pads else ()
            assert_close(y[real], z[real], 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_config_of_a_patched_model_builds_one_that_generates(name, implementation):
    if name == "bert_decoder" and implementation == "static":
        pytest.skip("the host itself has no static cache")
    family = FAMILIES[name]
    before = family.model()
    model = type(before)(patch(family.model(), "linear", "all").config).eval()
    model.load_state_dict(before.state_dict())
    tokens, mask = ids(), real_tokens(left=True).long()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": implementation}
    texts = [each.generate(tokens, attention_mask=mask, **options) for each in (model, before)]
    assert torch.equal(*texts)


def test_auto_classes_take_the_config_of_a_patched_model():
    from transformers import AutoModel

    config = patch(bert(), "linear", "all").config
    assert type(AutoModel.from_config(config)).__name__ == "BertModel"
    assert type(AutoModel.from_config(config, attn_implementation="eager")).__name__ == "BertModel"


@torch.no_grad()
def test_a_model_that_was_sent_to_another_process_keeps_its_masks(tmp_path):
    """Nothing is patched in that process, which has to know the implementation all the same."""
    model, tokens, mask = patch(bert().eval(), "linear", "all"), ids(), real_tokens()
    want = model(tokens, attention_mask=mask.long())[0]
    torch.save((model, tokens, mask, want), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, tokens, mask, want = torch.load(sys.argv[1], weights_only=False)\n"
        "got = model(tokens, attention_mask=mask.long())[0]\n"
        "assert torch.allclose(got[mask], want[mask], atol=1e-5)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)
