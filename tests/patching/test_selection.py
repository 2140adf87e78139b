"""Which layers are meant, what the plan says of them, and what is said of unknown models."""

import copy

import pytest
import torch
from torch import nn

from primal_attention import patch, plan, unpatch
from primal_attention.patching.sites import patched_layers

from .families import FAMILIES, Decoder, bert, gpt2, ids, llama


def deep():
    return bert(num_hidden_layers=5)


def numbers(model):
    return [int(name.split(".")[2]) for name in patched_layers(model)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (-1, [4]),
        (0, [0]),
        ([1, -1], [1, 4]),
        (range(2), [0, 1]),
        (slice(None, None, 2), [0, 2, 4]),
        ([slice(3, None), 0], [0, 3, 4]),
        ("all", [0, 1, 2, 3, 4]),
        ("encoder.layer.3.attention.self", [3]),
        (["*.1.*", "*.2.*"], [1, 2]),
    ],
)
def test_layers(layers, expected):
    assert numbers(patch(deep(), "linear", layers)) == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (5, "5 is out of range, the model has 5 layers"),
        (-6, "-6 is out of range"),
        ([], "selects none of 5"),
        (slice(9, 12), "selects none of 5"),
        ("*.9.*", r"no attention is called '\*.9.\*'; there are encoder.layer.0"),
        (1.5, "must be an index, a list of them, a slice, 'all' or names, got 1.5"),
        (True, "got True"),
        (None, "got None"),
    ],
)
def test_layers_that_mean_nothing(layers, message):
    model = deep()
    with pytest.raises(ValueError, match=message):
        patch(model, "linear", layers)
    assert not patched_layers(model)


def test_layers_keep_their_numbers_once_patched():
    model = patch(patch(deep(), "linear", 1), "flow", 3)
    assert numbers(model) == [1, 3]
    with pytest.raises(ValueError, match=r"encoder.layer.1.attention.self is patched already"):
        patch(model, "linear", [0, 1])
    assert numbers(model) == [1, 3]
    assert numbers(unpatch(model)) == []
    with pytest.raises(ValueError, match="has no patched layer"):
        unpatch(model)


def test_indices_count_self_attentions():
    model = patch(Decoder(), layers=-1)
    assert list(patched_layers(model)) == ["decoder.layers.1.self_attn"]
    assert len(patched_layers(patch(Decoder(), layers="all"))) == 4
    model = patch(patch(Decoder(), "linear", "decoder.layers.1.multihead_attn"), "flow", [0, -1])
    assert [layer.record.attention for layer in patched_layers(model).values()] == [
        "flow",
        "flow",
        "linear",
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_says_what_patching_does_and_does_nothing(name):
    family = FAMILIES[name]
    model = family.model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    planned = plan(model, "linear", family.layers)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    assert planned.parameters_before == sum(p.numel() for p in model.parameters())
    patch(model, "linear", family.layers)
    assert [layer.name for layer in planned.layers] == list(patched_layers(model))
    assert planned.parameters_after == sum(p.numel() for p in model.parameters())
    assert all(layer.causal == family.causal for layer in planned.layers)


def test_a_plan_in_words():
    text = str(plan(gpt2(), num_directions=5))
    assert text.splitlines()[0] == "GPT2LMHeadModel (GPT-2): 1 of 2 attention layers become primal"
    assert "transformer.h.1.attn  yes" in text
    assert "N^2 -> N" in text
    assert "two sums of constant size" in text
    assert "causal=True" in text
    assert "num_directions=5" in text


def test_a_plan_names_what_is_random_and_what_is_too_large():
    text = str(plan(gpt2(), weights="static", num_directions=5))
    assert "new: raw_lambda, w_e, w_r, score_proj, which start at random: distill or train" in text
    assert "num_directions=5 exceeds the head dimension 4" in text
    assert "warning" not in str(plan(gpt2(), num_directions=4))
    assert "new" not in str(plan(gpt2(), "linear"))
    assert "random" not in str(plan(bert(), "softmax_bn"))


def test_unknown_models_are_described():
    class OddAttention(nn.Module):
        pass

    with pytest.raises(
        ValueError, match=r"known: BERT.*OddAttention at 1; .*register_host makes"
    ) as told:
        patch(nn.Sequential(nn.Linear(2, 2), OddAttention()))
    assert "ModernBERT" in str(told.value) and "T5" not in str(told.value)
    with pytest.raises(ValueError, match=r"It seems to have none; .*register_host"):
        plan(nn.Sequential(nn.Linear(2, 2)))


def test_errors_of_options_change_nothing():
    model = deep()
    message = r"primal has no option 'directions'; did you mean num_directions\? It has"
    with pytest.raises(TypeError, match=message):
        patch(model, "primal", "all", directions=3)
    with pytest.raises(TypeError, match=r"linear has no option 'colour'\. It has .*causal, "):
        patch(model, "linear", "all", colour=3)
    message = r"attention must be one of 'primal'.*got 'softmaxx'; did you mean 'softmax'"
    with pytest.raises(ValueError, match=message):
        patch(model, "softmaxx")
    assert not patched_layers(model)


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own():
    model, tokens = patch(llama().eval(), "linear", "all"), ids()
    y, twin = model(tokens).logits, copy.deepcopy(model)
    assert torch.equal(twin(tokens).logits, y)
    twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert not torch.allclose(twin(tokens).logits, y)
    assert torch.equal(model(tokens).logits, y)
    unpatch(twin)
    assert torch.equal(model(tokens).logits, y)
