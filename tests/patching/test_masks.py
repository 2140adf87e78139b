"""The padding of a host's mask, and the masks that stand for something else."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention import patch
from primal_attention.patching.masks import context_mask_of, token_mask_of

from .families import MECHANISMS, N, assert_close, bert, eurobert, gpt2, ids, llama

booleans = st.lists(st.booleans(), min_size=1, max_size=9)


def additive(seen):
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def past(real, num_before, *, causal):
    """What each of the tokens after the first ones sees."""
    seen = torch.tensor(real)[None].expand(len(real), -1)
    seen = seen.tril() if causal else seen
    return seen[num_before:][None, None]


@given(booleans, st.integers(0, 8), st.booleans(), st.booleans())
def test_padding_is_recovered_from_every_form(real, num_before, causal, as_numbers):
    num_before = min(num_before, len(real) - 1) if causal else 0
    seen = past(real, num_before, causal=causal)
    mask = additive(seen) if as_numbers else seen
    arguments = {"num_queries": len(real) - num_before, "num_before": num_before, "causal": causal}
    expected = [real[num_before:]]
    assert token_mask_of(mask, **arguments).tolist() == expected
    assert token_mask_of(torch.tensor([real]).long(), **arguments).tolist() == expected
    # slots of a static cache that no token has filled yet
    unfilled = torch.cat([seen, torch.zeros(1, 1, seen.shape[2], 3, dtype=torch.bool)], dim=-1)
    assert token_mask_of(unfilled, **arguments).tolist() == expected
    assert token_mask_of(None, **arguments) is None


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4))
def test_any_other_mask_is_refused(rows):
    seen = torch.tensor(rows)[None, None]
    for causal in (False, True):
        allowed = [past(rows[-1], 0, causal=causal)]
        # a padded query may see everything: it does not matter what it sees
        lenient = allowed[0] | ~torch.tensor(rows[-1])[:, None] & seen.all(-1, keepdim=True)
        call = {"num_queries": 4, "num_before": 0, "causal": causal}
        if torch.equal(seen, lenient):
            assert token_mask_of(seen, **call).tolist() == [rows[-1]]
        else:
            with pytest.raises(ValueError, match="the mask is more than padding"):
                token_mask_of(seen, **call)


def test_a_context_has_one_row_of_padding():
    real = torch.tensor([[True, False, True]])
    seen = real[:, None, None].expand(1, 1, 5, 3)
    assert torch.equal(context_mask_of(additive(seen)), real)
    with pytest.raises(ValueError, match="more than padding"):
        context_mask_of(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())


def causal_mask():
    return torch.ones(2, 1, N, N, dtype=torch.bool).tril()


WINDOW = causal_mask().triu(-2)
BLOCKS = torch.block_diag(torch.ones(3, 3), torch.ones(N - 3, N - 3)).bool().expand(2, 1, N, N)
PREFIX = causal_mask() | (torch.arange(N) < 3)
HEADS = causal_mask().repeat(1, 6, 1, 1).index_fill(1, torch.tensor([2]), False)


@torch.no_grad()
@pytest.mark.parametrize(
    "mask",
    [WINDOW, BLOCKS & causal_mask(), PREFIX, HEADS, torch.ones(2, 1, N, N, dtype=torch.bool)],
    ids=["window", "blocks", "prefix", "heads", "full"],
)
def test_a_decoder_refuses_other_masks(mask):
    model = patch(llama().eval())
    for form in (mask, additive(mask)):
        with pytest.raises(ValueError, match="the mask is more than padding under a causal mask"):
            model(ids(), attention_mask=form)
    assert model(ids(), attention_mask=causal_mask()).logits.isfinite().all()


@torch.no_grad()
def test_one_mask_for_all_sequences():
    model = patch(llama().eval())
    tokens, seen = ids(), causal_mask() & (torch.arange(N) >= 2)
    own = model(tokens, attention_mask=seen, use_cache=False)[0]
    shared = model(tokens, attention_mask=seen[:1], use_cache=False)[0]
    torch.testing.assert_close(own[:, 2:], shared[:, 2:])


@torch.no_grad()
@pytest.mark.parametrize(
    "mask",
    [WINDOW, BLOCKS ^ torch.eye(N, dtype=torch.bool), causal_mask()],
    ids=["window", "holes", "past"],
)
def test_an_encoder_refuses_other_masks(mask):
    model = patch(bert().eval())
    with pytest.raises(ValueError, match="the mask is more than padding"):
        model(ids(), attention_mask=mask)


PACKED = {"bert": bert, "gpt2": gpt2, "llama": llama, "eurobert": eurobert}


@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("attention", [*MECHANISMS, "performer"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_do_not_see_each_other(name, attention, layers):
    """Three sequences in two rows, the second padded on the right, against each one alone."""
    options = {"causal": True} if name in ("gpt2", "llama") else {}
    model = patch(PACKED[name]().double().eval(), attention, layers, **options)
    tokens = ids()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    mask = BLOCKS.clone()
    mask[1, 0] = torch.arange(N) < 5
    if name in ("gpt2", "llama"):
        mask = mask & causal_mask()
    more = {} if name in ("bert", "eurobert") else {"use_cache": False}
    packed = model(tokens, attention_mask=mask, position_ids=positions, **more)[0]
    alone = [model(each[None], **more)[0] for each in (tokens[0, :3], tokens[0, 3:], tokens[1, :5])]
    assert_close(torch.cat([packed[0], packed[1, :5]]), torch.cat(alone, 1)[0])
    packed[0, :3].square().sum().backward()
    got = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    alone[0].square().sum().backward()
    assert_close(got, model.get_input_embeddings().weight.grad)


@torch.no_grad()
@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_that_start_again_are_packed_sequences(name, layers):
    model, tokens = patch(PACKED[name]().eval(), layers=layers), ids()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = [model(each, use_cache=False).logits for each in (tokens[:, :3], tokens[:, 3:])]
    assert_close(packed, torch.cat(alone, 1))


@torch.no_grad()
def test_bounds_of_packed_sequences():
    """As a collator for flash attention gives them, for which the host makes no mask."""
    model, tokens = patch(llama().eval(), layers="all"), ids().flatten()[None]
    bounds, places = torch.tensor([0, 4, 5, 14], dtype=torch.int32), torch.arange(14)[None]
    more = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "use_cache": False}
    packed = model(tokens, position_ids=places, **more).logits
    alone = [
        model(tokens[:, i:j], position_ids=places[:, i:j], use_cache=False).logits
        for i, j in pairwise(bounds)
    ]
    assert_close(packed, torch.cat(alone, 1))


@torch.no_grad()
def test_biases_are_refused():
    with pytest.raises(ValueError, match="adds numbers to the scores"):
        patch(bert().eval())(ids(), attention_mask=torch.randn(2, 1, N, N))


def test_a_sliding_window_is_refused_at_once():
    from transformers import MistralConfig, MistralForCausalLM

    from .families import TEXT

    model = MistralForCausalLM(MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=5))
    with pytest.raises(ValueError, match=r"layers.1.self_attn: .* sliding window of 5 tokens"):
        patch(model)


def test_a_compiled_model_refuses_when_it_runs():
    model = torch.compile(patch(gpt2().eval()), backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="the mask is more than padding"):
        model(ids(), attention_mask=WINDOW, use_cache=False)
