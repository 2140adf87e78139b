"""Domains: the registry, the names of tasks, and a domain that a program adds."""

import pytest
import torch

from primal_attention.models import MODELS
from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import (
    DOMAINS,
    Domain,
    Recipe,
    build_model,
    find_recipe,
    launch,
    task_of,
    train,
)


def toy_task(recipe, folder):
    """Which half of a sequence has the larger mean; as many cases as the set's name says."""

    def cases(count, seed):
        x = torch.randn(count, 7, 3, generator=torch.Generator().manual_seed(seed))
        return Cases({"x": x}, (x[:, :3].mean((1, 2)) > x[:, 3:].mean((1, 2))).long())

    sizes = Sizes(num_tokens=7, num_outputs=2, num_channels=3)
    train_cases, valid, test = (cases(int(recipe.set_name), seed) for seed in range(3))
    return Task(recipe.task, CLASSIFICATION, sizes, train_cases, valid, test)


def toy_recipe(name, model, seed):
    recipe = Recipe(f"toy/{name}", model, seed=seed, batch_size=5)
    return recipe.with_settings(["dim=8", "num_heads=2", "ffn_dim=13", "steps=2"])


TOY = Domain(sets=("10", "20"), make_task=toy_task, recipes={"clean": toy_recipe})


@pytest.mark.parametrize("model", ["primalformer", "primal_time_plus"])
def test_a_domain_is_one_object_and_one_line(model, monkeypatch):
    monkeypatch.setitem(DOMAINS, "toy", TOY)
    recipe = find_recipe("toy/10", model, "clean", seed=3)
    assert (recipe.domain, recipe.set_name, recipe.run.seed) == ("toy", "10", 3)
    outcome = train(recipe, task_of(recipe), launch("fp32", accelerator="cpu", devices=1))
    assert outcome.steps == 2
    assert 0 <= outcome.value <= 100


def test_a_domain_can_build_models_of_its_own(monkeypatch):
    built = torch.nn.Linear(3, 5)
    own = Domain(sets=(), make_task=toy_task, build_model=lambda recipe, sizes: built)
    monkeypatch.setitem(DOMAINS, "toy", own)
    assert build_model(Recipe("toy/10", "softmax"), Sizes(7, 2, num_channels=3)) is built


def test_every_domain_has_recipes_of_its_protocols_for_every_model():
    for name, domain in DOMAINS.items():
        assert "clean" in domain.recipes
        for protocol in domain.recipes:
            for model in MODELS:
                recipe = find_recipe(f"{name}/{domain.sets[0]}", model, protocol)
                assert (recipe.domain, recipe.set_name) == (name, domain.sets[0])
                assert recipe.run.protocol == protocol


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("uea", "softmax", "clean"), "a task is domain/set"),
        (("uea/", "softmax", "clean"), "a task is domain/set"),
        (("eua/Heartbeat", "softmax", "clean"), "no domain is called 'eua'; did you mean uea?"),
        (("uea/Heartbeat", "softmax", "cleen"), "no protocol is called 'cleen'; did you mean"),
        (("uea/Heartbeat", "sofmax", "clean"), "no model is called 'sofmax'; did you mean"),
    ],
)
def test_what_is_not_there_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        find_recipe(*words)
