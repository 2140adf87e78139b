"""Models by name: lists of attentions, and which options reach which layer."""

import pytest
import torch

from primal_attention.attention import ATTENTIONS
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.primal import PrimalAttention, PrimalTimeAttention
from primal_attention.models import MODELS, build_attentions
from primal_attention.models.stacks import layer_names, mechanism_of

from .small import D, H


def types(attentions):
    return [type(attention) for attention in attentions]


def test_primalformer_is_primal_in_every_layer():
    assert types(build_attentions("primalformer", 3, D, H)) == [PrimalAttention] * 3


def test_primal_plus_is_softmax_in_all_layers_but_the_last():
    built = types(build_attentions("primal_plus", 3, D, H))
    assert built == [SoftmaxAttention, SoftmaxAttention, PrimalAttention]
    assert types(build_attentions("primal_plus", 1, D, H)) == [PrimalAttention]


def test_models_of_the_time_weighted_layer():
    assert types(build_attentions("primalformer_time", 2, D, H)) == [PrimalTimeAttention] * 2
    built = build_attentions("primal_time_plus", 3, D, H, causal=True, num_directions=3)
    assert types(built) == [SoftmaxAttention, SoftmaxAttention, PrimalTimeAttention]
    assert built[-1].causal and built[-1].num_directions == 3


def test_every_mechanism_is_a_model():
    assert {mechanism_of(model) for model in MODELS} == set(ATTENTIONS)
    for model in MODELS[4:]:
        assert types(build_attentions(model, 2, D, H)) == [ATTENTIONS[model]] * 2
        assert layer_names(model, 2) == (model, model)


def test_layers_are_not_shared():
    first, second = build_attentions("softmax", 2, D, H)
    assert first is not second
    assert not torch.equal(first.q_proj.weight, second.q_proj.weight)


def test_options_go_to_the_mechanism_the_model_is_about():
    softmax, primal = build_attentions("primal_plus", 2, D, H, num_directions=3, dropout=0.5)
    assert primal.num_directions == 3
    assert (softmax.dropout, primal.dropout) == (0.0, 0.5)


def test_causal_reaches_every_layer_and_primal_is_static_unless_told():
    softmax, primal = build_attentions("primal_plus", 2, D, H, causal=True)
    assert softmax.causal and primal.causal
    assert primal.weights == "static"
    (dual,) = build_attentions("primalformer", 1, D, H, causal=True, weights="dual")
    assert dual.weights == "dual"


@pytest.mark.parametrize(("max_tokens", "landmarks"), [(None, 30), (23, 23), (300, 30)])
def test_max_tokens_bounds_the_landmarks(max_tokens, landmarks):
    for model in ("primalformer", "primal_plus"):
        *_, primal = build_attentions(model, 2, D, H, num_directions=3, max_tokens=max_tokens)
        assert primal.num_landmarks == landmarks


@pytest.mark.parametrize("model", MODELS)
def test_every_model_reads_sequences_of_max_tokens(model):
    """Linformer, for one, is made for 512 tokens unless told."""
    x = torch.randn(1, 601, D)
    for attention in build_attentions(model, 1, D, H, max_tokens=601):
        assert attention.eval()(x).shape == x.shape


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"model must be one of .*got 'transformer'"):
        build_attentions("transformer", 2, D, H)
    with pytest.raises(ValueError, match="num_layers must be a positive integer, got 0"):
        build_attentions("softmax", 0, D, H)
    with pytest.raises(ValueError, match="max_tokens must be a positive integer, got -1"):
        build_attentions("softmax", 1, D, H, max_tokens=-1)
    with pytest.raises(TypeError, match="num_directions"):
        build_attentions("softmax", 1, D, H, num_directions=3)
    with pytest.raises(TypeError, match="colour"):
        build_attentions("primalformer", 1, D, H, colour="red")
    with pytest.raises(ValueError, match="has no causal form"):
        build_attentions("linformer", 1, D, H, causal=True)
