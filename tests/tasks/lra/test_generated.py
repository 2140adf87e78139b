"""Generated sets: the same bytes for any number of workers, and after an interruption."""

import numpy as np
import pytest

from primal_attention.tasks.lra import (
    LRA_TASKS,
    PartSizes,
    chunks,
    listops,
    load_lra,
    pathfinder_files,
    prepare_lra,
)
from primal_attention.tasks.lra.chunks import made_in_chunks
from primal_attention.tasks.lra.listops import Trees

SIZES = {"listops": (1301, 7, 5), "pathfinder-6": (41, 7, 5)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pathfinder_files, "CHUNK", 20)


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
    assert pathfinder_files.SIZES == (160_000, 20_000, 20_000)
    assert "pathfinder128" in LRA_TASKS


def test_an_interrupted_set_goes_on_where_it_was(tmp_path, monkeypatch):
    drawn, draw = [], pathfinder_files.draw_images

    def draw_some(settings, seed, first, num):
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(first)
        return draw(settings, seed, first, num)

    monkeypatch.setattr(pathfinder_files, "draw_images", draw_some)
    with pytest.raises(KeyboardInterrupt):
        prepare_lra("pathfinder-6", tmp_path, sizes=SIZES["pathfinder-6"])
    assert not (tmp_path / "pathfinder-6.npz").exists()
    monkeypatch.undo()
    monkeypatch.setattr(pathfinder_files, "CHUNK", 20)
    told = []
    again = prepare_lra(
        "pathfinder-6",
        tmp_path,
        sizes=SIZES["pathfinder-6"],
        progress=lambda *done: told.append(done),
    )
    assert told == [(2, 3), (3, 3)]
    whole = prepare_lra("pathfinder-6", tmp_path / "no", sizes=SIZES["pathfinder-6"])
    assert again.read_bytes() == whole.read_bytes()


def test_a_tree_that_is_drawn_twice_is_kept_once(tmp_path, monkeypatch):
    def make(settings, seed, chunk, num):
        """The third tree of each chunk is that of the first."""
        tokens = np.full((3, 2048), 1 + chunk, dtype=np.uint8)
        tokens[1, 0], tokens[2, :] = 15, 1
        return Trees(tokens, np.arange(3, dtype=np.uint8))

    monkeypatch.setattr(listops, "make_trees", make)
    monkeypatch.setattr(listops, "CHUNK", 3)
    prepare_lra("listops", tmp_path, sizes=PartSizes(4, 1, 1))
    prepared = load_lra("listops", tmp_path)
    assert len(np.unique(prepared.tokens, axis=0)) == 6
    assert prepared.targets.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_damaged_chunk_is_named(tmp_path):
    make = lambda index: [np.full((2, 3), index, np.uint8)]  # noqa: E731
    read = lambda: [chunk[0] for chunk in made_in_chunks(make, 3, tmp_path, shapes=[(2, 3)])]  # noqa: E731
    assert [chunk.max() for chunk in read()] == [0, 1, 2]
    path = tmp_path / "000001.npz"
    path.write_bytes(b"PK no")
    with pytest.raises(ValueError, match=r"000001\.npz is not a whole chunk .*; delete it"):
        read()
    np.savez(path, **{"0": np.zeros((2, 4), np.uint8)})
    with pytest.raises(ValueError, match=r"000001\.npz .*its arrays are not uint8 \[\(2, 3\)\]"):
        read()


def test_workers_are_checked(tmp_path):
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        prepare_lra("pathfinder", tmp_path, workers=0)
    assert chunks.no_progress(1, 2) is None
