"""Associative recall: cases against their definition, the metric, and a model that learns."""

import numpy as np
import pytest
import torch

from primal_attention.tasks.recall import IGNORED, NUM_KEYS, VOCAB_SIZE, recall_cases, recall_task
from primal_attention.training import find_recipe, launch, train


@pytest.mark.parametrize(("pairs", "num_tokens"), [(1, 3), (4, 29), (7, 21), (64, 512)])
def test_every_key_is_asked_once_and_answered_by_its_value(pairs, num_tokens):
    cases = recall_cases(13, pairs, num_tokens, np.random.default_rng(5))
    for ids, target in zip(cases.inputs["ids"].tolist(), cases.target.tolist(), strict=True):
        listed = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        assert len(listed) == pairs
        assert all(0 < key <= NUM_KEYS < value < VOCAB_SIZE for key, value in listed.items())
        asked = {key: value for key, value in zip(ids, target, strict=True) if value != IGNORED}
        assert asked == listed
        blanks = [token for token in ids[2 * pairs :] if token == 0]
        assert len(blanks) == num_tokens - 3 * pairs


def test_questions_come_in_random_order_and_places():
    cases = recall_cases(400, 4, 30, np.random.default_rng(0))
    asked = cases.target != IGNORED
    counts = asked[:, 8:].sum(0)  # 1,600 questions over 22 places
    assert not asked[:, :8].any()
    assert counts.min() > 40 and counts.max() < 110
    first = cases.inputs["ids"][torch.arange(400), asked.int().argmax(1)]
    place = (cases.inputs["ids"][:, :8:2] == first[:, None]).int().argmax(1)
    assert torch.bincount(place, minlength=4).min() > 60


def test_cases_follow_from_the_seed_and_tests_do_not():
    one, again, other = (recall_task("2", num_tokens=9, sizes=(5, 3, 4), seed=s) for s in (1, 1, 2))
    assert torch.equal(one.train.target, again.train.target)
    assert not torch.equal(one.train.target, other.train.target)
    for part in ("valid", "test"):
        assert torch.equal(getattr(one, part).target, getattr(other, part).target)
    assert not torch.equal(one.valid.target, one.test.target[:3])


def test_the_metric_is_the_share_of_right_answers():
    task = recall_task("3", num_tokens=12, sizes=(4, 4, 4))
    batch = task.test[torch.arange(4)]
    right = torch.nn.functional.one_hot(batch.target.clamp(min=0).long(), VOCAB_SIZE).float()
    wrong = right.roll(1, -1)
    mixed = torch.where(torch.arange(12)[:, None] % 2 == 0, right, wrong)
    assert task.goal.scores(right, batch.target).tolist() == [1.0] * 4
    assert task.goal.scores(wrong, batch.target).tolist() == [0.0] * 4
    asked = batch.target >= 0
    share = (asked & (torch.arange(12) % 2 == 0)).sum(-1) / 3
    assert torch.allclose(task.goal.scores(mixed, batch.target), share)
    logits = torch.randn(4, 12, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = torch.stack(
        [
            torch.nn.functional.cross_entropy(rows[here], answers[here].long())
            for rows, answers, here in zip(logits, batch.target, asked, strict=True)
        ]
    )
    assert torch.allclose(task.goal.losses(logits.clone(), batch.target), expected)


@pytest.mark.parametrize(("name", "tokens"), [("0", 9), ("four", 9), ("4", 11), ("1024", 5000)])
def test_what_cannot_be_drawn_is_refused(name, tokens):
    with pytest.raises(ValueError, match=r"number of pairs|pairs need at least"):
        recall_task(name, num_tokens=tokens, sizes=(1, 1, 1))


@pytest.mark.parametrize("model", ["primalformer_time", "softmax", "primalformer", "linear"])
def test_models_train_on_it(model):
    recipe = find_recipe("recall/4", model, "clean").with_settings(
        ["dim=16", "num_heads=2", "ffn_dim=16", "steps=2", "batch_size=3", "precision=fp32"]
    )
    task = recall_task("4", num_tokens=20, sizes=(6, 3, 3))
    outcome = train(recipe, task, launch("fp32", accelerator="cpu", devices=1))
    assert outcome.steps == 2
    assert 0 <= outcome.value <= 100
