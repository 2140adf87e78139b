"""Generation: the state in the host's cache gives what the full pass gives, and stays small."""

import copy
import io

import pytest
import torch
from transformers import CompileConfig, StaticCache

from primal_attention import patch

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

    linear = patch(gpt2().eval(), "linear")
    cache = linear(tokens).past_key_values
    with pytest.raises(ValueError, match=r"cannot remove 2 of 7 tokens .* 0 can be removed here"):
        cache.crop(-2)
    cache = linear(tokens, past_key_values=StaticCache(linear.config, 20)).past_key_values
    with pytest.raises(ValueError, match="cannot remove 2 of 7 tokens"):
        cache.layers[1].crop(-2)

    with pytest.raises(ValueError, match="not causal"):
        patch(gpt2().eval(), "linear", causal=False)(tokens)

    unpatched = gpt2().eval()
    cache = unpatched(tokens).past_key_values
    with pytest.raises(ValueError, match="start a patched model with an empty cache"):
        patch(copy.deepcopy(unpatched))(tokens, past_key_values=cache)
    cache = linear(tokens).past_key_values
    with pytest.raises(ValueError, match="takes no keys and values"):
        unpatched(tokens, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize("name", DECODERS)
def test_the_last_tokens_can_be_removed(name, attention):
    """In one pass of many tokens, and tokens one by one, back to the start of either and beyond."""
    model = patch(FAMILIES[name].model(), attention, "all")
    tokens = torch.randint(3, 31, (1, 20))
    full = model(tokens).logits
    for remove in (1, 3, 4, 5, 9, 15, 16):
        cache = model(tokens[:, :9]).past_key_values
        model(tokens[:, 9:12], past_key_values=cache)
        for i in range(12, 16):
            model(tokens[:, i : i + 1], past_key_values=cache)
        cache.crop(-remove)
        assert cache.get_seq_length() == 16 - remove
        rest = model(tokens[:, 16 - remove :], past_key_values=cache).logits
        assert_close(rest, full[:, 16 - remove :])


@torch.no_grad()
def test_the_way_back_has_a_constant_size():
    model = patch(llama(max_position_embeddings=1000).eval(), "linear", "all")

    def size(length, steps):
        cache = model(torch.randint(3, 31, (1, length))).past_key_values
        for _ in range(steps):
            model(torch.randint(3, 31, (1, 1)), past_key_values=cache)
        buffer = io.BytesIO()
        torch.save(cache, buffer)
        cache.crop(-100)
        return buffer.tell()

    longest = size(400, 300)
    assert size(300, 0) < longest < 1.2 * size(400, 200)


@torch.no_grad()
@pytest.mark.parametrize("draft", ["itself", "another", "prompt"])
@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_assisted_decoding_gives_what_greedy_search_gives(name, layers, draft):
    family, tokens = FAMILIES[name], torch.randint(3, 31, (1, 9))
    model = patch(family.model(), layers=layers)
    other = model if draft == "itself" else patch(family.model(seed=3), layers=layers)
    help_ = {"prompt_lookup_num_tokens": 3} if draft == "prompt" else {"assistant_model": other}
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(
        model.generate(tokens, **options, **help_), model.generate(tokens, **options)
    )


@torch.no_grad()
@pytest.mark.parametrize("attention", ["primal", "linear", "flow"])
@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_compiled_graph_decodes_in_a_static_cache(name, layers, attention):
    model, tokens = patch(FAMILIES[name].model(), attention, layers), ids()
    mask = real_tokens(left=True)
    want = generate(model, tokens, mask)
    torch.compiler.reset()
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    config._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            options = {"cache_implementation": "static", "compile_config": config}
            assert torch.equal(generate(model, tokens, mask, **options), want)
    assert hasattr(model, "_compiled_call")


@torch.no_grad()
@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_pass_with_its_cache_is_one_graph(name, layers):
    model, tokens = patch(FAMILIES[name].model(), layers=layers), ids()
    want = model(tokens).logits
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    out = compiled(tokens[:, :4], use_cache=True)
    rest = compiled(tokens[:, 4:], past_key_values=out.past_key_values, use_cache=True)
    assert_close(torch.cat([out.logits, rest.logits], 1), want)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_keys_have_a_shape_and_no_numbers(name):
    unpatched, tokens = FAMILIES[name].model(), ids()
    host = unpatched(tokens).past_key_values
    cache = patch(unpatched)(tokens).past_key_values
    for ours, theirs in zip(cache.layers, host.layers, strict=True):
        for mine, its in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
    with pytest.raises(NotImplementedError, match="no data"):
        cache.layers[1].keys.cpu()
    with pytest.raises(RuntimeError, match="meta"):
        torch.cat([cache.layers[1].keys, host.layers[1].keys])
