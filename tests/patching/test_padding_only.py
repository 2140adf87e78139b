"""Models that are patched throughout hand the padding to their layers as it came."""

import copy

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
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    with pytest.raises(ValueError, match="packed"):
        model(tokens, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="more than padding"):
        model(tokens, attention_mask=torch.ones(2, 1, 7, 7, dtype=torch.bool))
