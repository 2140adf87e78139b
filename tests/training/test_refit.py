"""Training anew on all cases, as long as the validation cases said."""

import pytest
import torch

from primal_attention.tasks import Cases
from primal_attention.training import Watcher, train, train_in
from primal_attention.training import loop as the_loop
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.loop import REFIT

from .toy import TEST, TRAIN, VALID, one_process, toy_recipe, toy_task

FABRIC = one_process()
TASK = toy_task()


class Plans(Watcher):
    """Notes the plan of every training; interrupts the second one, if told, at its first step."""

    def __init__(self, interrupt=False):
        self.plans, self.interrupt = [], interrupt

    def start(self, recipe, plan, progress):
        self.plans.append(plan)

    def step(self, step):
        if self.interrupt and len(self.plans) == 2:
            raise KeyboardInterrupt


def test_cases_join_in_order():
    joined = TASK.train.joined(TASK.valid)
    assert len(joined) == TRAIN + VALID
    assert torch.equal(joined.target[TRAIN:], TASK.valid.target)
    assert all(
        torch.equal(joined.inputs[name][:TRAIN], each) for name, each in TASK.train.inputs.items()
    )


def test_the_second_training_has_all_cases_and_the_epochs_of_the_best_round(tmp_path):
    recipe = toy_recipe(epochs=7, refit=True, lr=0.02)
    watcher = Plans()
    outcome = train_in(tmp_path, recipe, TASK, FABRIC, watcher=watcher, save_every=0)
    first, second = watcher.plans
    assert (first.num_cases, second.num_cases) == (TRAIN, TRAIN + VALID)
    assert second.epochs == outcome.rounds[outcome.best]["epoch"]
    assert outcome.steps == len(outcome.rounds) * first.steps_per_epoch + second.total_steps
    once = train(toy_recipe(epochs=7, lr=0.02), TASK, FABRIC)
    assert outcome.rounds == once.rounds
    assert outcome.valid == once.valid
    assert not all(torch.equal(outcome.weights[name], once.weights[name]) for name in once.weights)
    saved = read_checkpoint(tmp_path / BEST)
    assert all(torch.equal(saved.tensors[name], each) for name, each in outcome.weights.items())


def test_the_test_cases_are_looked_at_once(monkeypatch):
    looks = []
    evaluate = the_loop.evaluate

    def counted(model, goal, cases: Cases, fabric):
        looks.append(len(cases))
        return evaluate(model, goal, cases, fabric)

    monkeypatch.setattr(the_loop, "evaluate", counted)
    train(toy_recipe(epochs=3, refit=True), TASK, FABRIC)
    assert looks.count(TEST) == 1
    assert looks[-1] == TEST


def test_an_interrupted_second_training_goes_on(tmp_path):
    recipe = toy_recipe(epochs=4, refit=True, dropout=0.2)
    whole = train_in(tmp_path / "whole", recipe, TASK, FABRIC, save_every=0)
    with pytest.raises(KeyboardInterrupt):
        train_in(
            tmp_path / "parts", recipe, TASK, FABRIC, watcher=Plans(interrupt=True), save_every=0
        )
    parts = train_in(tmp_path / "parts", recipe, TASK, FABRIC, save_every=0)
    assert (tmp_path / "parts" / REFIT).is_dir()
    assert (whole.value, whole.rounds, whole.steps) == (parts.value, parts.rounds, parts.steps)
    assert all(torch.equal(whole.weights[name], each) for name, each in parts.weights.items())


def test_test_cases_are_never_trained_on():
    with pytest.raises(ValueError, match="refit=True needs a valid_fraction"):
        toy_recipe(refit=True, valid_fraction=None)
