"""Language models: their recipes, what they learn, and how they are measured."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from primal_attention.attention import PrimalAttention
from primal_attention.models import LanguageModel
from primal_attention.models.stacks import layer_names
from primal_attention.tasks import Sizes
from primal_attention.tasks.language import load_language
from primal_attention.training import build_model, evaluation, find_recipe, task_of, train, train_in
from primal_attention.training.optimizers import build_optimizer
from primal_attention.training.outcome import OutOfTimeError
from primal_attention.training.schedules import lr_factor

from ..tasks.toy_text import write_text
from .toy import one_process

FABRIC = one_process()
FIVE = ["softmax", "primal_plus", "primalformer", "linear", "flow"]
SMALL = [
    *("num_layers=2", "dim=16", "num_heads=2", "ffn_dim=23", "dropout=0.1", "precision=fp32"),
    *("context_tokens=11", "num_tokens=17", "batch_size=8", "steps=60", "eval_every=30", "lr=0.01"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the text is, for whoever looks for data."""
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    return write_text(tmp_path / "wikitext-2").parent


def small_recipe(model, *settings, protocol="paper"):
    options = ["attention.num_directions=3"] if model.startswith("primal") else []
    recipe = find_recipe("language/wikitext-2", model, protocol)
    return recipe.with_settings([*SMALL, *options, *settings])


def run(recipe, **options):
    return train(recipe, task_of(recipe), FABRIC, **options)


def model_of(outcome, sizes):
    model = build_model(outcome.recipe, sizes)
    model.load_state_dict(outcome.weights)
    return model.double().eval()


@torch.no_grad()
def plain_perplexity(model, cases):
    """One window after the other, in float64."""
    losses = []
    for ids, target in zip(cases.inputs["ids"], cases.target.tolist(), strict=True):
        logs = model(ids[None])[0].log_softmax(-1)
        losses += [-logs[i, word].item() for i, word in enumerate(target) if word >= 0]
    return math.exp(sum(losses) / len(losses)), len(losses)


def unigram_perplexity(corpus):
    """Of the words of the test part, each with its frequency in the training part."""
    counts, total = Counter(corpus.train.tolist()), len(corpus.train)
    losses = [-math.log(counts[word] / total) for word in corpus.test.tolist()]
    return math.exp(sum(losses) / len(losses))


# Recipes


@pytest.mark.parametrize("name", ["wikitext-103", "wikitext-2"])
@pytest.mark.parametrize("model", FIVE)
def test_the_network_is_that_of_the_published_runs(name, model):
    found = find_recipe(f"language/{name}", model, "paper")
    expected = {
        **{"num_layers": 6, "dim": 512, "num_heads": 8, "ffn_dim": 2048, "norm": "pre"},
        **{"optimizer": "adamw", "weight_decay": 0.01, "lr": 1e-3, "adam_beta2": 0.98},
        **{"num_tokens": 512, "context_tokens": 400, "batch_size": 64, "clip_norm": None},
        **{"valid_fraction": 0, "eta": 0.1 if "primal" in model else 0},
    }
    assert found.flat().items() >= expected.items()
    assert found.model.attention.get("num_directions") == (30 if "primal" in model else None)


def test_schedules():
    paper = find_recipe("language/wikitext-103", "softmax", "paper")
    expected = {"steps": 150_000, "dropout": 0.1, "schedule": "inverse_sqrt"}
    assert paper.flat().items() >= expected.items()
    assert paper.optim.warmup * paper.optim.steps == pytest.approx(6_000)
    ours = find_recipe("language/wikitext-2", "softmax", "paper")
    assert ours.optim.steps < paper.optim.steps and ours.model.dropout > paper.model.dropout
    clean = find_recipe("language/wikitext-2", "softmax", "clean")
    assert (clean.optim.schedule, clean.optim.clip_norm) == ("cosine", 1.0)
    with pytest.raises(
        ValueError, match="no text is called 'wikitext-3'; did you mean wikitext-103"
    ):
        find_recipe("language/wikitext-3", "softmax", "paper")


@pytest.mark.parametrize("model", ["primalformer_time", "primal_time_plus"])
def test_models_with_a_learned_time_train(folder, model):
    outcome = run(small_recipe(model, "steps=2", "eval_every=2"))
    assert outcome.steps == 2
    assert math.isfinite(outcome.value)


def test_the_learning_rate_falls_with_the_root_of_the_step():
    factors = [lr_factor("inverse_sqrt", step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 0.5) / 10 for step in range(10)])
    assert factors[10:] == pytest.approx([math.sqrt(10 / (step + 0.5)) for step in range(10, 100)])


@pytest.mark.parametrize("setting", ["num_tokens=0", "context_tokens=-1", "adam_beta2=1"])
def test_settings_that_make_no_sense(setting):
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        small_recipe("softmax", setting)


def test_settings_that_do_not_fit_the_text(folder):
    with pytest.raises(ValueError, match=r"context_tokens .* below num_tokens=17, got 17"):
        task_of(small_recipe("softmax", "context_tokens=17"))
    with pytest.raises(ValueError, match=r"valid_fraction of language/wikitext-2 is 0.*got 0\.2"):
        task_of(small_recipe("softmax", "valid_fraction=0.2"))


# Models


@pytest.mark.parametrize("model", FIVE)
def test_a_causal_model_of_the_named_layers(model):
    recipe = small_recipe(model, "num_layers=3")
    built = build_model(recipe, Sizes(17, 13, vocab_size=13))
    assert isinstance(built, LanguageModel)
    attentions = [block.attention for block in built.decoder.blocks]
    assert all(attention.causal for attention in attentions)
    assert all(block.activation == "relu" for block in built.decoder.blocks)
    primal = [isinstance(attention, PrimalAttention) for attention in attentions]
    assert primal == [name == "primal" for name in layer_names(model, 3)]
    weights = {attention.weights for attention in attentions if hasattr(attention, "weights")}
    assert weights == {"primalformer": {"dual"}, "primal_plus": {"static"}}.get(model, set())
    optimizer = build_optimizer(recipe, built)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.98)}


def test_sizes_without_symbols_are_refused():
    with pytest.raises(ValueError, match="no vocab_size"):
        build_model(small_recipe("softmax"), Sizes(17, 13, num_channels=5))


# Runs


@pytest.mark.parametrize("model", FIVE)
def test_learns_what_follows_what(folder, model):
    recipe = small_recipe(model)
    outcome, corpus = run(recipe), load_language("wikitext-2", folder)
    assert outcome.metric == "perplexity"
    assert outcome.value < 0.6 * unigram_perplexity(corpus)
    perplexities = [entry["valid_perplexity"] for entry in outcome.rounds]
    assert outcome.valid == min(perplexities)


@pytest.mark.parametrize("targets", [17, 50, 2**13])
def test_the_metric_counts_every_word_once_and_no_objective(folder, monkeypatch, targets):
    """Whatever the batches are, and however large the weight of the objective."""
    monkeypatch.setattr(evaluation, "_TARGETS", targets)
    recipe = small_recipe("primal_plus", "eta=100", "steps=3", "eval_every=3")
    task, outcome = task_of(recipe), run(recipe)
    assert outcome.rounds[0]["objective"] > 0
    expected, counted = plain_perplexity(model_of(outcome, task.sizes), task.test)
    assert outcome.value == pytest.approx(expected, rel=1e-5)
    assert counted == len(load_language("wikitext-2", folder).test)


def test_evaluations_hold_few_logits_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(evaluation, "_TARGETS", 50)
    sizes, forward = [], LanguageModel.forward

    def noted(self, ids, **options):
        sizes.append((self.training, ids.numel()))
        return forward(self, ids, **options)

    monkeypatch.setattr(LanguageModel, "forward", noted)
    run(small_recipe("linear", "steps=1", "eval_every=1"))
    assert max(size for training, size in sizes if not training) <= 50


@pytest.mark.parametrize("model", ["primalformer", "primal_plus"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(folder, tmp_path, model):
    recipe = small_recipe(model, "steps=20", "eval_every=8", protocol="clean")
    whole = run(recipe)
    for steps in (8, 16):
        with pytest.raises(OutOfTimeError, match=f"after step {steps}$"):
            train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC, until=0)
    parts = train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC)
    assert (whole.rounds, whole.value, whole.best) == (parts.rounds, parts.value, parts.best)
    assert all(torch.equal(whole.weights[name], parts.weights[name]) for name in whole.weights)


def test_bf16_logits_count_in_a_higher_precision(folder):
    recipe = small_recipe("softmax", "precision=bf16", "steps=2", "eval_every=2")
    task = task_of(recipe)
    outcome = train(recipe, task, one_process("bf16"))
    expected, _ = plain_perplexity(model_of(outcome, task.sizes), task.test)
    assert outcome.value == pytest.approx(expected, rel=0.01)


def test_a_step_moves_every_parameter_that_is_trained(folder):
    """The loss writes its gradient over the logits; nothing of it is lost on the way."""
    recipe = small_recipe("primalformer", "steps=1", "eval_every=1", "weight_decay=0", "dropout=0")
    task = task_of(recipe)
    torch.manual_seed(recipe.run.seed)
    before = build_model(recipe, task.sizes)
    after = run(recipe).weights
    trained = [name for name, each in before.named_parameters() if each.requires_grad]
    assert isinstance(before, nn.Module) and trained
    assert all(not torch.equal(before.state_dict()[name], after[name]) for name in trained)


@pytest.mark.parametrize("model", ["primalformer", "flow"])
def test_a_compiled_model_trains_to_the_same(folder, compiled, model):
    recipe = small_recipe(model, "dropout=0", "steps=6", "eval_every=3")
    plain, same = run(recipe), run(recipe.with_settings(["compile=true"]))
    assert compiled == [True]  # one graph, and none for evaluations
    for entry, other in zip(plain.rounds, same.rounds, strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
