"""The recipes of the Long Range Arena have the settings of the published runs."""

import pytest

from primal_attention.tasks import LRA_TASKS
from primal_attention.tasks.lra import PATHFINDERS
from primal_attention.training import Recipe, find_recipe
from primal_attention.training.results import settings_of

PUBLISHED = {  # steps, batch, warm-up, evaluation every, then s and eta of both models
    "listops": (5_000, 32, 1_000, 50, (20, 0.1), (30, 0.05)),
    "text": (20_000, 32, 8_000, 500, (20, 0.05), (30, 0.1)),
    "retrieval": (30_000, 32, 800, 300, (30, 0.0), (20, 0.05)),
    "image": (35_000, 256, 175, 175, (30, 0.1), (30, 0.1)),
    "pathfinder": (62_400, 256, 312, 312, (30, 0.1), (20, 0.05)),
}
ALL = [(name, protocol) for name in PUBLISHED for protocol in ("paper", "clean")]


def recipe(name, model="primalformer", protocol="paper"):
    return find_recipe(f"lra/{name}", model, protocol)


@pytest.mark.parametrize(("name", "protocol"), ALL)
def test_schedule_and_network(name, protocol):
    steps, batch, warmup, eval_every, *_ = PUBLISHED[name]
    for model in ("softmax", "primalformer", "nystrom"):
        found = recipe(name, model, protocol)
        assert (found.steps, found.batch_size, found.eval_every) == (steps, batch, eval_every)
        assert found.warmup * steps == pytest.approx(warmup)
        assert (found.num_layers, found.dim, found.num_heads, found.ffn_dim) == (2, 64, 2, 128)
        assert (found.norm, found.dropout, found.head_hidden_dim) == ("pre", 0.1, 128)
        assert (found.optimizer, found.lr, found.adam_eps) == ("adamw", 1e-4, 1e-6)
        assert (found.weight_decay, found.clip_norm, found.schedule) == (0, None, "one_cycle")
        assert found.num_towers == (2 if name == "retrieval" else 1)
        assert found.patience is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_directions_and_eta_of_the_scripts(name):
    for model, (directions, eta) in zip(
        ("primalformer", "primal_plus"), PUBLISHED[name][4:], strict=True
    ):
        found = recipe(name, model)
        assert found.attention == {"num_directions": directions, "samples_per_direction": 10}
        assert (found.eta, found.objective) == (eta, "released_batch")
        clean = recipe(name, model, "clean")
        assert (clean.attention["num_directions"], clean.eta) == (30, 0.1)
    assert recipe(name, "performer").attention == {"num_features": 256}
    assert recipe(name, "softmax").eta == 0


@pytest.mark.parametrize(("name", "protocol"), ALL)
def test_the_quirks_are_those_of_the_paper_alone(name, protocol):
    found = recipe(name, protocol=protocol)
    is_paper = protocol == "paper"
    assert found.pooling == ("padded_mean" if is_paper else "mean")
    assert found.mask_primal == (not is_paper)
    assert found.mask_attention
    assert recipe(name, "softmax", protocol).mask_primal
    text = None if is_paper else 0.1
    assert found.valid_fraction == (text if name == "text" else 0.0)


def test_tasks_that_the_paper_does_not_have_follow_those_it_has():
    for name in LRA_TASKS:
        like = "pathfinder" if name in PATHFINDERS else name.removesuffix("-imdb")
        for protocol in ("paper", "clean"):
            found, expected = (recipe(each, protocol=protocol) for each in (name, like))
            assert settings_of(found) == settings_of(expected)


def test_a_name_that_there_is_not():
    with pytest.raises(ValueError, match="'listop'; did you mean listops"):
        find_recipe("lra/listop", "softmax", "paper")


def test_settings_lead_back_to_the_recipe():
    found = recipe("retrieval").with_settings(["steps=8000"])
    settings = settings_of(found)
    assert "steps=8000" in settings.split()
    assert Recipe(found.task, found.model, "paper").with_settings(settings.split()) == found
