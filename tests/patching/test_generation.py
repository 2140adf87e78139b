"""Generation: the state in the host's cache gives what the full pass gives, and stays small."""

import copy

import pytest
import torch

from primal_attention import patch
from primal_attention.patching.state import StateLayer

from .families import DECODERS, FAMILIES, MECHANISMS, N, assert_close, gpt2, ids, llama, real_tokens

NEW = 6


def generate(model, tokens, mask, **options):
    return model.generate(
        tokens,
        attention_mask=mask.long(),
        max_new_tokens=NEW,
        do_sample=False,
        **options,
    )


def longer(mask):
    return torch.cat([mask, torch.ones(mask.shape[0], NEW - 1, dtype=torch.bool)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("layers", [0, 1, "all"])
@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_equals_the_full_pass(name, attention, layers):
    family = FAMILIES[name]
    model, tokens, mask = family.model(), ids(), real_tokens(left=True)
    patch(model, attention, layers)
    out = generate(model, tokens, mask, return_dict_in_generate=True, output_logits=True)
    step = torch.stack(out.logits, dim=1)
    positions = (longer(mask).cumsum(1) - 1).clamp(min=0)
    full = model(
        out.sequences[:, :-1], attention_mask=longer(mask).long(), position_ids=positions
    ).logits[:, N - 1 :]
    assert_close(step, full)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["static", "dual"])
def test_generation_with_both_causal_forms_of_primal(weights):
    model, tokens = patch(llama().eval(), layers="all", weights=weights), ids()
    mask = real_tokens(left=True)
    assert torch.equal(
        generate(model, tokens, mask), generate(model, tokens, mask, use_cache=False)
    )


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
def test_beam_search_reorders_the_state(attention):
    model, tokens, mask = patch(gpt2().eval(), attention, "all"), ids(), real_tokens(left=True)
    with_state = generate(model, tokens, mask, num_beams=3, num_return_sequences=3)
    without = generate(model, tokens, mask, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(with_state, without)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "linear", "flow"])
def test_the_state_does_not_grow(attention):
    model = patch(llama().eval(), attention, "all")

    def size(length):
        cache = model(torch.randint(3, 31, (2, length))).past_key_values
        assert cache.get_seq_length() == length
        return sum(tensor.numel() for layer in cache.layers for tensor in layer.state)

    assert size(5) == size(29)


@torch.no_grad()
def test_a_static_cache_goes_with_a_patched_layer():
    model, tokens, mask = patch(llama().eval(), layers=1), ids(), real_tokens(left=True)
    assert torch.equal(
        generate(model, tokens, mask, cache_implementation="static"),
        generate(model, tokens, mask, use_cache=False),
    )


@torch.no_grad()
def test_a_cache_can_be_continued_copied_and_reset():
    model, tokens = patch(gpt2().eval(), layers="all"), ids()
    full = model(tokens).logits
    cache = model(tokens[:, :3]).past_key_values
    again = copy.deepcopy(cache)
    for past in (cache, again):
        assert_close(model(tokens[:, 3:], past_key_values=past).logits, full[:, 3:])
    cache.reset()
    assert_close(model(tokens, past_key_values=cache).logits, full)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert all(tensor.shape[0] == 2 for layer in cache.layers for tensor in layer.state)


def test_a_training_pass_can_be_continued():
    model, tokens = patch(gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0), layers=0), ids()
    full = model.train()(tokens).logits
    cache = model(tokens[:, :4]).past_key_values
    assert_close(model(tokens[:, 4:], past_key_values=cache).logits, full[:, 4:])


@torch.no_grad()
def test_what_the_state_cannot_do_is_an_error():
    model, tokens = patch(gpt2().eval(), "reformer"), ids()
    mask = torch.ones_like(tokens)
    assert model(tokens).logits.isfinite().all()
    assert generate(model, tokens, mask, use_cache=False).shape == (2, N + NEW)
    with pytest.raises(ValueError, match="reformer has no decode state"):
        generate(model, tokens, mask)

    with pytest.raises(ValueError, match="cannot remove 2 tokens"):
        StateLayer().crop(2)

    with pytest.raises(ValueError, match="not causal"):
        patch(gpt2().eval(), "linear", causal=False)(tokens)

    unpatched = gpt2().eval()
    cache = unpatched(tokens).past_key_values
    with pytest.raises(ValueError, match="start a patched model with an empty cache"):
        patch(unpatched)(tokens, past_key_values=cache)
