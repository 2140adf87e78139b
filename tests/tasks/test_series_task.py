import numpy as np
import pytest
import torch

from primal_attention.tasks import SeriesEncoding, series_task

from .toy_series import NAN, C, make_series

TRAIN_LABELS = np.array(["b", "a", "10", "b", "a", "10", "b", "a", "10", "b", "a"])
TEST_LABELS = np.array(["a", "10", "b", "b", "a"])


def make_task(train=None, test=None, *, valid=0.3, seed=5, **labels):
    train = make_series(range(2, 13), seed=1) if train is None else train
    test = make_series((3, 17, 5, 7, 2), seed=2) if test is None else test
    train_labels = labels.get("train_labels", TRAIN_LABELS)
    test_labels = labels.get("test_labels", TEST_LABELS)
    return series_task("toy", train, train_labels, test, test_labels, valid=valid, seed=seed)


def test_the_protocol_of_the_paper_trains_on_all_and_validates_on_test():
    train = make_series(range(2, 13), seed=1)
    task = make_task(train, valid="test")
    inputs = SeriesEncoding.fit(train).encode(train)
    assert torch.equal(task.train.inputs["x"], inputs["x"])
    assert torch.equal(task.train.inputs["token_mask"], inputs["token_mask"])
    assert task.valid is task.test and len(task.test) == 5
    assert (task.sizes.num_tokens, task.sizes.num_channels, task.sizes.num_outputs) == (12, C, 3)


def test_targets_are_indices_of_the_sorted_names():
    task = make_task(valid="test")
    assert task.labels == ("10", "a", "b")
    assert [task.labels[i] for i in task.train.target] == TRAIN_LABELS.tolist()
    assert [task.labels[i] for i in task.test.target] == TEST_LABELS.tolist()


def test_a_clean_split_takes_its_cases_from_train():
    train = make_series(range(2, 13), seed=1)
    task = make_task(train)
    assert len(task.train) == 8 and len(task.valid) == 3 and len(task.test) == 5
    assert sorted(task.valid.target.tolist()) == [0, 1, 2]
    encoded = task.encoding.encode(train)
    flat = [tuple(case.flatten().tolist()) for case in encoded["x"]]
    x = dict(zip(flat, TRAIN_LABELS, strict=True))
    for part in (task.train, task.valid):
        for case, target in zip(part.inputs["x"], part.target, strict=True):
            assert x.pop(tuple(case.flatten().tolist())) == task.labels[target]
    assert not x


def test_seeds_choose_the_validation_cases():
    first, again, other = (make_task(seed=seed).valid.inputs["x"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


@pytest.mark.parametrize("valid", [0.3, "test"])
def test_training_never_sees_the_test_cases(valid):
    clean = make_task(valid=valid)
    poison = [np.full((C, 29), 1e6), *[np.full((C, 1), NAN)] * 4]
    poisoned = make_task(test=poison, valid=valid)
    assert torch.equal(clean.train.inputs["x"], poisoned.train.inputs["x"])
    assert clean.sizes == poisoned.sizes


def test_training_never_sees_the_validation_cases():
    train = make_series(range(2, 13), seed=1)
    clean = make_task(train)
    encoded = clean.encoding.encode(train)["x"]
    valid = clean.valid.inputs["x"]
    held_out = [i for i, x in enumerate(encoded) if any(torch.equal(x, v) for v in valid)]
    assert len(held_out) == 3
    poisoned = [np.full((C, 31), 1e6) if i in held_out else case for i, case in enumerate(train)]
    task = make_task(poisoned)
    assert torch.equal(clean.train.inputs["x"], task.train.inputs["x"])
    assert torch.equal(clean.test.inputs["x"], task.test.inputs["x"])
    kept = [case for i, case in enumerate(train) if i not in held_out]
    assert task.sizes.num_tokens == max(case.shape[1] for case in kept)


def test_the_encoding_of_a_task_answers_new_cases():
    test = make_series((3, 17, 5, 7, 2), seed=2)
    task = make_task(test=test)
    inputs = task.encoding.encode(test)
    assert torch.equal(inputs["x"], task.test.inputs["x"])
    assert torch.equal(inputs["token_mask"], task.test.inputs["token_mask"])


def test_wrong_tasks():
    with pytest.raises(ValueError, match=r"test has labels \['c', 'd'\]"):
        make_task(test_labels=np.array(["a", "d", "c", "b", "a"]))
    with pytest.raises(ValueError, match="train has 11 series and 5 labels"):
        make_task(train_labels=TEST_LABELS)
    with pytest.raises(ValueError, match="test has 5 series and 11 labels"):
        make_task(test_labels=TRAIN_LABELS)
    with pytest.raises(ValueError, match=r"valid .*'Test'"):
        make_task(valid="Test")
    with pytest.raises(ValueError, match=r"fraction .*1\.5"):
        make_task(valid=1.5)
    with pytest.raises(ValueError, match="2 channels"):
        make_task(train=make_series(range(2, 13), channels=2))
