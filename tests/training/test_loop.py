"""The loop learns, stops, clips, uses the objective and tells what it did."""

import math
from dataclasses import replace

import pytest
import torch

from primal_attention.objectives import ksvd_loss
from primal_attention.tasks import REGRESSION, Cases, Sizes
from primal_attention.training import Watcher, build_model, train
from primal_attention.training.evaluation import evaluate

from .toy import CLASSES, N, one_process, toy_recipe, toy_task

FABRIC = one_process()
TASK = toy_task()


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def start(recipe):
    with torch.random.fork_rng():
        torch.manual_seed(recipe.run.seed)
        return build_model(recipe, TASK.sizes).state_dict()


@pytest.mark.parametrize("model", ["softmax", "primalformer", "primal_plus"])
def test_learns(model):
    outcome = train(toy_recipe(model, epochs=17, lr=1e-2), TASK, FABRIC)
    assert outcome.value > 70  # of three classes
    assert outcome.rounds[-1]["train_loss"] < 0.9 * outcome.rounds[0]["train_loss"]
    assert outcome.metric == "accuracy"
    assert outcome.steps == 17 * 4


def test_learns_a_number():
    def targets(cases):
        return Cases(cases.inputs, cases.target.float())

    task = replace(
        TASK,
        goal=REGRESSION,
        sizes=replace(TASK.sizes, num_outputs=1),
        train=targets(TASK.train),
        valid=targets(TASK.valid),
        test=targets(TASK.test),
    )
    outcome = train(toy_recipe(epochs=17, lr=1e-2), task, FABRIC)
    assert outcome.metric == "mse"
    found = [entry["valid_mse"] for entry in outcome.rounds]
    assert outcome.valid == min(found) == found[outcome.best] < 0.5 * found[0]


def test_learns_symbols():
    inputs = {"x": TASK.train.target[:, None].expand(-1, N).clone()}
    cases = Cases(inputs, TASK.train.target)
    sizes = Sizes(N, CLASSES, vocab_size=7)
    task = replace(TASK, sizes=sizes, train=cases, valid=cases, test=cases)
    assert train(toy_recipe(epochs=11, lr=1e-2), task, FABRIC).value == 100


def test_same_seed_same_run_and_another_seed_another():
    first, again = (train(toy_recipe(), TASK, FABRIC) for _ in range(2))
    other = train(toy_recipe(seed=1), TASK, FABRIC)
    assert first.rounds == again.rounds
    assert distance(first.weights, again.weights) == 0
    assert other.rounds[0]["train_loss"] != first.rounds[0]["train_loss"]


def test_random_numbers_of_the_caller_are_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(toy_recipe(epochs=1, dropout=0.3), TASK, FABRIC)
    assert torch.equal(torch.rand(3), expected)


def test_best_weights_are_those_evaluated():
    recipe = toy_recipe(epochs=13, lr=3e-2)
    outcome = train(recipe, TASK, FABRIC)
    values = [entry["valid_accuracy"] for entry in outcome.rounds]
    assert outcome.valid == max(values) == values[outcome.best]
    model = build_model(recipe, TASK.sizes)
    model.load_state_dict(outcome.weights)
    assert evaluate(model, TASK.goal, TASK.test, FABRIC).value == outcome.value
    found = evaluate(model, TASK.goal, TASK.valid, FABRIC)
    assert found.value == outcome.valid
    assert found.loss == outcome.rounds[outcome.best]["valid_loss"]


def test_of_equal_rounds_the_one_with_the_lower_loss_is_best():
    goal = replace(TASK.goal, scores=lambda outputs, target: torch.ones(len(target)))
    outcome = train(toy_recipe(epochs=13, lr=0.1), replace(TASK, goal=goal), FABRIC)
    losses = [entry["valid_loss"] for entry in outcome.rounds]
    assert losses[outcome.best] == min(losses) < losses[-1]


def test_evaluation_is_the_mean_over_the_cases(monkeypatch):
    model = build_model(toy_recipe(), TASK.sizes)
    whole = evaluate(model, TASK.goal, TASK.valid, FABRIC)
    monkeypatch.setattr("primal_attention.training.evaluation._TOKENS", 7 * N)
    parts = evaluate(model, TASK.goal, TASK.valid, FABRIC)
    with torch.no_grad():
        outputs = model(**TASK.valid.inputs)
    right = (outputs.argmax(-1) == TASK.valid.target).double().mean().item()
    loss = torch.nn.functional.cross_entropy(outputs, TASK.valid.target).item()
    for found in (whole, parts):
        assert found.value == pytest.approx(100 * right)
        assert found.loss == pytest.approx(loss, rel=1e-5)


def test_stops_early():
    class Noted(Watcher):
        told = 0

        def round(self, entry):
            self.told += 1

    watcher = Noted()
    outcome = train(toy_recipe(epochs=100, patience=3, lr=0.3), TASK, FABRIC, watcher=watcher)
    assert len(outcome.rounds) - 1 - outcome.best == 3
    assert len(outcome.rounds) == watcher.told < 100


def test_rounds_of_several_epochs():
    outcome = train(toy_recipe(epochs=5, eval_every=2), TASK, FABRIC)
    assert [entry["epoch"] for entry in outcome.rounds] == [2, 4, 5]
    assert [entry["step"] for entry in outcome.rounds] == [8, 16, 20]
    # What is trained on does not depend on when it is looked at, but for the random numbers.
    often = train(toy_recipe(epochs=5, dropout=0.0), TASK, FABRIC)
    seldom = train(toy_recipe(epochs=5, dropout=0.0, eval_every=5), TASK, FABRIC)
    assert seldom.rounds[0]["valid_loss"] == often.rounds[-1]["valid_loss"]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "radam"])
def test_step_is_that_of_the_optimizer_on_loss_plus_eta_objective(optimizer):
    recipe = toy_recipe(
        optimizer=optimizer, epochs=1, batch_size=64, dropout=0.0, clip_norm=None, eta=0.7
    )
    outcome = train(recipe, TASK, FABRIC)
    model = build_model(recipe, TASK.sizes)
    model.load_state_dict(start(recipe))
    outputs = model.train()(**TASK.train.inputs)
    loss = torch.nn.functional.cross_entropy(outputs, TASK.train.target)
    objective = ksvd_loss(model, objective="released")
    (loss + 0.7 * objective).backward()
    steps = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    steps[optimizer](model.parameters(), lr=recipe.optim.lr, weight_decay=0.0).step()
    assert distance(outcome.weights, model.state_dict()) < 1e-4 * recipe.optim.lr + 1e-6
    assert outcome.rounds[0]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.rounds[0]["objective"] == pytest.approx(objective.item(), rel=1e-5)


def test_eta_trains_lambda_and_without_it_nothing_does():
    with_eta, without = (
        train(toy_recipe(eta=eta, epochs=2, weight_decay=0.1), TASK, FABRIC) for eta in (0.5, 0.0)
    )
    before = start(toy_recipe())
    names = [name for name in before if name.endswith("raw_lambda")]
    assert len(names) == 2
    for name in names:
        assert not torch.equal(with_eta.weights[name], before[name])
        assert torch.equal(without.weights[name], before[name])
    w_e = next(name for name in before if name.endswith("w_e"))
    assert not torch.equal(with_eta.weights[w_e], without.weights[w_e])
    assert with_eta.rounds[0]["objective"] > 0 == without.rounds[0]["objective"]


def test_one_side_of_the_scores_without_objective():
    recipe = toy_recipe(eta=0.0, epochs=1, attention={"num_directions": 3, "scores": "e"})
    outcome, before = train(recipe, TASK, FABRIC), start(recipe)
    moved = {name for name in before if not torch.equal(outcome.weights[name], before[name])}
    assert any(name.endswith("w_e") for name in moved)
    assert not any(name.endswith("w_r") for name in moved)


def test_clipping_bounds_the_step():
    # RAdam's first steps are those of SGD with momentum: a clipped gradient is a short step.
    moved = {}
    for clip_norm in (None, 1e-3):
        recipe = toy_recipe(epochs=1, batch_size=64, clip_norm=clip_norm, lr=0.1)
        moved[clip_norm] = distance(train(recipe, TASK, FABRIC).weights, start(recipe))
    assert moved[1e-3] <= 0.1 * 1e-3 * 1.0001
    assert moved[None] > 0.1 * 1e-2


def test_schedule_is_followed():
    slow = toy_recipe(schedule="warmup", warmup=1.0, epochs=1, batch_size=64, clip_norm=None)
    fast = slow.replace(schedule="constant")
    steps = [distance(train(recipe, TASK, FABRIC).weights, start(slow)) for recipe in (slow, fast)]
    assert steps[0] == pytest.approx(steps[1] / 2, rel=1e-3)


def test_a_loss_that_is_no_number_is_told():
    x = TASK.train.inputs["x"].clone()
    x[3] = math.inf
    task = replace(TASK, train=Cases({**TASK.train.inputs, "x": x}, TASK.train.target))
    with pytest.raises(
        FloatingPointError, match=r"loss is nan in epoch 1; try a lower lr than 0\.001"
    ):
        train(toy_recipe(), task, FABRIC)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_task_without_cases_is_told(part):
    empty = Cases(
        {name: each[:0] for name, each in TASK.valid.inputs.items()}, TASK.valid.target[:0]
    )
    with pytest.raises(ValueError, match=f"toy has no case in {part}"):
        train(toy_recipe(), replace(TASK, **{part: empty}), FABRIC)


def test_bf16():
    outcome = train(toy_recipe(precision="bf16", epochs=17, lr=1e-2), TASK, one_process("bf16"))
    exact = train(toy_recipe(epochs=1, lr=1e-2), TASK, FABRIC)
    assert outcome.value > 70
    assert {each.dtype for each in outcome.weights.values()} == {torch.float32}
    first, expected = (each.rounds[0]["train_loss"] for each in (outcome, exact))
    assert first != expected
    assert first == pytest.approx(expected, rel=0.03)


def test_precision_of_recipe_and_processes_must_agree():
    with pytest.raises(ValueError, match="launch them with launch\\('bf16'\\)"):
        train(toy_recipe(precision="bf16"), TASK, FABRIC)
