"""The recipes of the Long Range Arena have the settings of the published runs."""

import pytest

from primal_attention.tasks import LRA_TASKS
from primal_attention.tasks.lra import PATHFINDERS
from primal_attention.training import find_recipe
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
        expected = {
            **{"steps": steps, "batch_size": batch, "eval_every": eval_every, "patience": None},
            **{"num_layers": 2, "dim": 64, "num_heads": 2, "ffn_dim": 128, "norm": "pre"},
            **{"dropout": 0.1, "head_hidden_dim": 128, "num_towers": 1 + (name == "retrieval")},
            **{"optimizer": "adamw", "lr": 1e-4, "adam_eps": 1e-6, "weight_decay": 0},
            **{"clip_norm": None, "schedule": "one_cycle"},
        }
        assert found.flat().items() >= expected.items()
        assert found.optim.warmup * steps == pytest.approx(warmup)


@pytest.mark.parametrize("name", PUBLISHED)
def test_directions_and_eta_of_the_scripts(name):
    for model, (directions, eta) in zip(
        ("primalformer", "primal_plus"), PUBLISHED[name][4:], strict=True
    ):
        found = recipe(name, model)
        assert found.model.attention == {"num_directions": directions, "samples_per_direction": 10}
        assert (found.optim.eta, found.optim.objective) == (eta, "released_batch")
        clean = recipe(name, model, "clean")
        assert (clean.model.attention["num_directions"], clean.optim.eta) == (30, 0.1)
    assert recipe(name, "performer").model.attention == {"num_features": 256}
    assert recipe(name, "softmax").optim.eta == 0


@pytest.mark.parametrize(("name", "protocol"), ALL)
def test_the_quirks_are_those_of_the_paper_alone(name, protocol):
    found = recipe(name, protocol=protocol)
    is_paper = protocol == "paper"
    assert found.model.pooling == ("padded_mean" if is_paper else "mean")
    assert found.model.mask_primal == (not is_paper)
    assert found.model.mask_attention
    assert recipe(name, "softmax", protocol).model.mask_primal
    text = None if is_paper else 0.1
    assert found.data.valid_fraction == (text if name == "text" else 0.0)


def test_tasks_that_the_paper_does_not_have_follow_those_it_has():
    for name in LRA_TASKS:
        like = "pathfinder" if name in PATHFINDERS else name.removesuffix("-imdb")
        for protocol in ("paper", "clean"):
            found, expected = (recipe(each, protocol=protocol) for each in (name, like))
            assert settings_of(found) == settings_of(expected)


def test_a_name_that_there_is_not():
    with pytest.raises(ValueError, match="'listop'; did you mean listops"):
        find_recipe("lra/listop", "softmax", "paper")
