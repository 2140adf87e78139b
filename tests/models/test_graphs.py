"""Compiled, exported, copied and saved models are the same models."""

import copy
import io

import pytest
import torch

from primal_attention import ksvd_loss, record_ksvd
from primal_attention.models import LanguageModel, TwoTowerClassifier, build_attentions

from .small import (
    FFN,
    MASK,
    D,
    H,
    K,
    N,
    V,
    classifier,
    gradients,
    randomise,
    symbols,
    tower,
    vectors,
)


@pytest.fixture(autouse=True)
def no_compiled_graphs():
    torch.compiler.reset()


def a_classifier():
    return classifier("primal_plus", pooling="class_token"), (vectors(),), {"token_mask": MASK}


def a_pair():
    inputs = symbols(seed=1), symbols(length=7, seed=2)
    return TwoTowerClassifier(tower(of_symbols=True), K), inputs, {"mask_a": MASK}


def a_language_model():
    attentions = build_attentions("primal_plus", 2, D, H, causal=True)
    return LanguageModel(V, attentions, D, FFN), (symbols(),), {"token_mask": MASK}


@pytest.fixture(params=[a_classifier, a_pair, a_language_model])
def case(request):
    torch.manual_seed(0)
    model, inputs, masks = request.param()
    return randomise(model.double()), inputs, masks


@pytest.mark.parametrize("name", ["softmax", "primalformer", "primal_plus"])
@pytest.mark.parametrize("pooling", ["mean", "class_token", "flatten"])
def test_a_classifier_is_one_graph(name, pooling):
    model, x = randomise(classifier(name, pooling=pooling).double()), vectors()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, expected = compiled(x, token_mask=MASK), model(x, token_mask=MASK)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(
        gradients(model, logits.square().sum()), gradients(model, expected.square().sum())
    )


def test_every_model_is_one_graph(case):
    model, inputs, masks = case
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with record_ksvd(model):
        outputs = compiled(*inputs, **masks)
    by_name = gradients(model, outputs.square().mean() + ksvd_loss(model))
    with record_ksvd(model):
        expected = model(*inputs, **masks)
    torch.testing.assert_close(outputs, expected)
    expected = gradients(model, expected.square().mean() + ksvd_loss(model))
    torch.testing.assert_close(by_name, expected)


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_a_step_is_one_graph_for_every_position(weights):
    attentions = build_attentions("primalformer", 1, D, H, causal=True, weights=weights)
    model = randomise(LanguageModel(V, attentions, D, FFN).double()).eval()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.step, fullgraph=True, backend=count)
    ids, state = symbols(), model.init_state(len(MASK))
    for t in range(N):
        with torch.no_grad():
            logits, state = step(ids[:, t], state)
    torch.testing.assert_close(logits, model(ids)[:, -1])
    assert len(graphs) == 1


def test_exported_models_take_any_number_of_sequences(case):
    model, inputs, masks = case
    model.eval()
    batch = torch.export.Dim("batch", min=2)
    shapes = {name: {0: batch} for name in ("x", "ids", "a", "b", "token_mask", "mask_a", "mask_b")}
    names = {"x": "x", "ids": "ids"}
    named = dict(
        zip(("a", "b") if len(inputs) == 2 else (_first_argument(model),), inputs, strict=True)
    )
    named.update(masks)
    program = torch.export.export(
        model, (), named, dynamic_shapes={name: shapes[name] for name in named}
    )
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in named.items()}
    torch.testing.assert_close(program.module()(**twice), model(**twice))


def _first_argument(model):
    return "ids" if isinstance(model, LanguageModel) else "x"


def test_a_copy_is_the_same_and_its_own(case):
    model, inputs, masks = case
    expected = model(*inputs, **masks)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(*inputs, **masks), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(*inputs, **masks), expected)


def test_parameters_survive_a_file(case):
    model, inputs, masks = case
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = randomise(copy.deepcopy(model), seed=1)
    assert not torch.allclose(other(*inputs, **masks), model(*inputs, **masks))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*inputs, **masks), model(*inputs, **masks))
