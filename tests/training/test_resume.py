"""A run that was interrupted and resumed is the run that was not."""

from dataclasses import replace

import pytest
import torch

from primal_attention.tasks import SeriesEncoding
from primal_attention.training import Watcher, build_model, train, train_in
from primal_attention.training.checkpoint import BEST, LAST, read_checkpoint

from .toy import Interrupted, one_process, toy_recipe, toy_task

FABRIC = one_process()
TASK = toy_task()


def assert_same(a, b):
    assert a.rounds == b.rounds
    assert (a.value, a.valid, a.best, a.steps) == (b.value, b.valid, b.best, b.steps)
    assert_equal(a.weights, b.weights)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def interrupted(recipe, directory, epoch, fabric=FABRIC, **options):
    with pytest.raises(KeyboardInterrupt):
        train_in(directory, recipe, TASK, fabric, watcher=Interrupted(epoch), **options)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("primalformer", {}),
        ("softmax", {"optimizer": "adamw", "schedule": "one_cycle", "warmup": 0.3}),
        ("primal_plus", {"optimizer": "adam", "eval_every": 2, "weight_decay": 0.1}),
        ("softmax_bn", {"eta": 0.0, "attention": {}}),
        ("reformer", {"eta": 0.0, "attention": {}}),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, model, settings):
    recipe = toy_recipe(model, epochs=6, dropout=0.3, **settings)
    whole = train_in(tmp_path / "whole", recipe, TASK, FABRIC, save_every=0)
    interrupted(recipe, tmp_path / "parts", 4, save_every=0)
    seen = read_checkpoint(tmp_path / "parts" / LAST).facts["progress"]["rounds"]
    assert [entry["epoch"] for entry in seen] in ([1, 2, 3], [2])
    torch.manual_seed(17)  # whatever the caller's random numbers are
    parts = train_in(tmp_path / "parts", recipe, TASK, FABRIC, save_every=0)
    assert_same(whole, parts)
    for name in (LAST, BEST):
        ends = [read_checkpoint(tmp_path / run / name) for run in ("whole", "parts")]
        assert_equal(ends[0].tensors, ends[1].tensors)


def test_interrupted_before_anything_was_saved(tmp_path):
    recipe = toy_recipe()
    interrupted(recipe, tmp_path, 3)
    assert not (tmp_path / LAST).exists()
    assert_same(train_in(tmp_path, recipe, TASK, FABRIC), train(recipe, TASK, FABRIC))


def test_early_stopping_remembers(tmp_path):
    recipe = toy_recipe(epochs=100, patience=3, lr=0.3)
    whole = train(recipe, TASK, FABRIC)
    interrupted(recipe, tmp_path, len(whole.rounds) - 1, save_every=0)
    assert_same(whole, train_in(tmp_path, recipe, TASK, FABRIC))


def test_a_run_that_is_over_is_not_trained_again(tmp_path):
    class NoStep(Watcher):
        def step(self, step):
            raise AssertionError

    first = train_in(tmp_path, toy_recipe(), TASK, FABRIC)
    (tmp_path / "result.json").unlink()
    again = train_in(tmp_path, toy_recipe(), TASK, FABRIC, watcher=NoStep())
    assert_same(first, again)
    assert again.seconds == first.seconds


def test_another_recipe_in_the_directory_is_refused(tmp_path):
    train_in(tmp_path, toy_recipe(epochs=1), TASK, FABRIC)
    before = (tmp_path / LAST).read_bytes()
    with pytest.raises(ValueError, match=r"another recipe \(epochs=1\); choose another directory"):
        train_in(tmp_path, toy_recipe(epochs=2), TASK, FABRIC)
    assert (tmp_path / LAST).read_bytes() == before


def test_best_is_written_again_where_a_kill_came_before_it(tmp_path):
    outcome = train_in(tmp_path, toy_recipe(), TASK, FABRIC)
    (tmp_path / BEST).unlink()
    train_in(tmp_path, toy_recipe(), TASK, FABRIC)
    assert_equal(read_checkpoint(tmp_path / BEST).tensors, outcome.weights)


def test_saving_happens_no_more_often_than_asked(tmp_path):
    saved = []

    class Noted(Watcher):
        def round(self, entry):
            saved.append((tmp_path / LAST).exists())

    train_in(tmp_path, toy_recipe(), TASK, FABRIC, watcher=Noted(), save_every=1e6)
    assert saved == [False] * 5
    assert (tmp_path / LAST).exists()  # the end is always saved


def test_best_checkpoint_is_all_a_user_needs(tmp_path):
    encoding = SeriesEncoding.fit([torch.randn(5, 11).numpy()])
    task = replace(TASK, labels=("a", "b", "c"), encoding=encoding)
    outcome = train_in(tmp_path, toy_recipe(), task, FABRIC)
    best = read_checkpoint(tmp_path / BEST)
    assert best.facts["labels"] == ["a", "b", "c"]
    assert SeriesEncoding.from_dict(best.facts["encoding"]).to_dict() == encoding.to_dict()
    assert best.facts["round"] == outcome.rounds[outcome.best]
    recipe = type(outcome.recipe).from_json(best.facts["recipe"])
    model = build_model(recipe, type(task.sizes)(**best.facts["sizes"]))
    model.load_state_dict(best.tensors)


def test_scale_of_the_loss_in_fp16_is_kept(tmp_path):
    def fp16():  # as on a GPU: the scale changes every third step
        from lightning_fabric import Fabric
        from lightning_fabric.plugins import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return Fabric(accelerator="cpu", devices=1, plugins=[plugin])

    recipe = toy_recipe(precision="fp16", clip_norm=None)
    whole = train(recipe, TASK, fp16())
    interrupted(recipe, tmp_path, 4, fp16(), save_every=0)
    kept = read_checkpoint(tmp_path / LAST).facts["precision"]
    assert (kept["scale"], kept["_growth_tracker"]) == (2.0**14, 0)
    assert_same(whole, train_in(tmp_path, recipe, TASK, fp16()))
