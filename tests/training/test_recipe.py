"""Settings of a recipe by name and type, and its text."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from primal_attention.training import Recipe, find_recipe
from primal_attention.training.results import settings_of

RECIPE = Recipe("uea/JapaneseVowels", "primalformer", attention={"num_directions": 30})


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("lr=3e-4", "lr", 3e-4),
        ("epochs=7", "epochs", 7),
        ("model=softmax", "model", "softmax"),
        ("mask_attention=False", "mask_attention", False),
        ("mask_attention=true", "mask_attention", True),
        ("clip_norm=none", "clip_norm", None),
        ("clip_norm=0.5", "clip_norm", 0.5),
        ("patience=11", "patience", 11),
        ("valid_fraction=None", "valid_fraction", None),
    ],
)
def test_setting_has_the_type_of_the_field(setting, name, value):
    changed = RECIPE.with_settings([setting])
    assert changed.flat()[name] == value
    assert type(changed.flat()[name]) is type(value)
    assert changed.replace(**{name: RECIPE.flat()[name]}) == RECIPE


def test_settings_are_given_flat_and_kept_by_section():
    recipe = Recipe("uea/A", "softmax", seed=3, num_tokens=7, dim=8, lr=0.5, precision="bf16")
    assert (recipe.domain, recipe.set_name) == ("uea", "A")
    assert recipe.model.name == "softmax"
    found = recipe.data.num_tokens, recipe.model.dim, recipe.optim.lr, recipe.run.precision
    assert (*found, recipe.run.seed) == (7, 8, 0.5, "bf16", 3)
    with pytest.raises(TypeError, match="no setting is called 'dimm'; did you mean dim"):
        Recipe("uea/A", "softmax", dimm=8)
    with pytest.raises(FrozenInstanceError):
        recipe.model.dim = 9


@pytest.mark.parametrize(
    "found",
    [
        find_recipe("lra/retrieval", "primalformer", "paper").with_settings(["steps=8000"]),
        find_recipe("images/tiny-imagenet-100", "primal_plus", "paper"),
        find_recipe("language/wikitext-2", "primalformer", "paper"),
    ],
    ids=lambda recipe: recipe.task,
)
def test_settings_lead_back_to_the_recipe(found):
    again = Recipe(found.task, found.model.name, found.run.protocol)
    assert again.with_settings(settings_of(found).split()) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40", 40),
        ("0.5", 0.5),
        ("dual", "dual"),
        ("true", True),
        ("None", None),
        ("[1, 2]", [1, 2]),
    ],
)
def test_setting_of_the_mechanism(text, value):
    changed = RECIPE.with_settings([f"attention.weights={text}"])
    assert changed.model.attention == {"num_directions": 30, "weights": value}


def test_later_settings_win():
    assert RECIPE.with_settings(["lr=1", "lr=2"]).optim.lr == 2


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("epoch=3", "did you mean epochs"),
        ("zzz=3", "there are task, valid_fraction"),
        ("epochs", "key=value"),
        ("epochs=many", "epochs must be an int, got 'many'"),
        ("mask_attention=1", "mask_attention must be a bool, got '1'"),
        ("model=primal_former", "did you mean primalformer"),
        ("schedule=onecycle", "did you mean one_cycle"),
        ("precision=fp8", "did you mean fp"),
        ("lr=0", "lr must be positive"),
        ("lr=nan", "lr must be positive"),
        ("epochs=0", "epochs must be at least 1"),
        ("eta=-1", "eta must be not negative"),
        ("warmup=1.5", "warmup must be between 0 and 1"),
        ("valid_fraction=1", r"valid_fraction must be in \(0, 1\)"),
        ("seed=-1", "seed must be not negative"),
        ("attention=3", "no setting is called 'attention'"),
        ("patience=0", "patience must be at least 1"),
        ("clip_norm=0", "clip_norm must be positive"),
    ],
)
def test_bad_setting_is_told_by_name(setting, told):
    with pytest.raises(ValueError, match=told):
        RECIPE.with_settings([setting])


def test_text_and_back():
    recipe = RECIPE.with_settings(["clip_norm=none", "lr=0.1", "attention.weights=dual", "seed=7"])
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert json.loads(recipe.to_json())["attention"] == {"num_directions": 30, "weights": "dual"}


def test_text_with_a_setting_that_there_is_not():
    with pytest.raises(ValueError, match="no setting is called 'eppochs'; did you mean epochs"):
        Recipe.from_json('{"task": "uea/A", "model": "softmax", "eppochs": 3}')


def test_the_same_recipe_after_a_round_trip_of_tuples():
    recipe = RECIPE.replace(attention={"ratios": (1, 2)})
    recipe.check_same(Recipe.from_json(recipe.to_json()), Path("here"))


def test_another_recipe_is_told_by_what_differs():
    with pytest.raises(ValueError, match=r"here holds .* \(lr=0.5, seed=3\)"):
        RECIPE.check_same(RECIPE.replace(seed=3, lr=0.5), Path("here"))
