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
    model = classifier("primal_plus", pooling="class_token")
    return model, {"x": vectors(), "token_mask": MASK}


def a_pair():
    model = TwoTowerClassifier(tower(of_symbols=True), K)
    return model, {"a": symbols(seed=1), "b": symbols(length=7, seed=2), "mask_a": MASK}


def a_language_model():
    attentions = build_attentions("primal_plus", 2, D, H, causal=True)
    return LanguageModel(V, attentions, D, FFN), {"ids": symbols(), "token_mask": MASK}


@pytest.fixture(params=[a_classifier, a_pair, a_language_model])
def case(request):
    torch.manual_seed(0)
    model, inputs = request.param()
    return randomise(model.double()), inputs


def one_graph(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def test_a_classifier_without_primal_layers_is_one_graph():
    model, x = randomise(classifier("softmax", pooling="flatten").double()), vectors()
    logits, expected = one_graph(model)(x, token_mask=MASK), model(x, token_mask=MASK)
    torch.testing.assert_close(logits, expected)
    by_name = gradients(model, logits.square().sum())
    torch.testing.assert_close(by_name, gradients(model, expected.square().sum()))


def test_every_model_is_one_graph_and_keeps_its_objective(case):
    model, inputs = case
    results = []
    for forward in (one_graph(model), model):
        with record_ksvd(model):
            outputs = forward(**inputs)
        loss = outputs.square().mean() + ksvd_loss(model)
        results.append((outputs, gradients(model, loss)))
    torch.testing.assert_close(results[0], results[1])


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
    model, inputs = case
    model.eval()
    batch = torch.export.Dim("batch", min=2)
    shapes = {name: {0: batch} for name in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    twice = {name: torch.cat([tensor, tensor.flip(1)]) for name, tensor in inputs.items()}
    torch.testing.assert_close(program.module()(**twice), model(**twice))


def test_a_copy_is_the_same_and_its_own(case):
    model, inputs = case
    expected = model(**inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**inputs), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(**inputs), expected)


def test_parameters_survive_a_file(case):
    model, inputs = case
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = randomise(copy.deepcopy(model), seed=1)
    assert not torch.allclose(other(**inputs), model(**inputs))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(**inputs), model(**inputs))
