"""Generated sets: the same bytes for any number of workers."""

import numpy as np
import pytest

from primal_attention.tasks.lra import (
    LRA_TASKS,
    listops,
    load_lra,
    pathfinder,
    prepare_lra,
)

SIZES = {"listops": (1301, 7, 5), "pathfinder-6": (41, 7, 5)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pathfinder, "CHUNK", 20)


@pytest.mark.parametrize("name", SIZES)
def test_same_bytes_for_any_number_of_workers(tmp_path, name):
    alone, together = (
        prepare_lra(name, tmp_path, tmp_path / str(workers), sizes=SIZES[name], workers=workers)
        for workers in (1, 2)
    )
    assert alone.read_bytes() == together.read_bytes()
    assert [path.name for path in together.parent.iterdir()] == [f"{name}.npz"]
    prepared = load_lra(name, together.parent)
    assert prepared.sizes == SIZES[name]
    assert len(np.unique(prepared.tokens, axis=0)) == sum(SIZES[name])
    assert prepared.facts["seed"] == 0 and prepared.facts["settings"]


def test_other_seed_other_bytes(tmp_path):
    one, other = (
        prepare_lra("pathfinder-6", tmp_path, tmp_path / str(seed), sizes=(9, 1, 1), seed=seed)
        for seed in (1, 2)
    )
    assert one.read_bytes() != other.read_bytes()


def test_the_sizes_are_those_of_the_arena():
    assert listops.SIZES == (96_000, 2_000, 2_000)
    assert pathfinder.SIZES == (160_000, 20_000, 20_000)
    assert "pathfinder128" in LRA_TASKS


def test_workers_are_checked(tmp_path):
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        prepare_lra("pathfinder", tmp_path, workers=0)
