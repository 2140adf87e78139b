"""Layers and models whose sequences are sharded over processes."""

import shutil

import pytest
import torch

from primal_attention.training import launch, read_outcome

from .programs import toys


@pytest.mark.parametrize("size", [2, 4])
def test_shards_compute_what_one_process_does(together, size):
    together("forms", size)


def test_models_compute_what_one_process_does(together):
    together("models", 2)


def test_bytes_do_not_depend_on_the_number_of_tokens(together):
    together("messages", 2)


def test_a_checkpoint_of_four_processes_goes_on_with_two_and_one(together, tmp_path):
    kept = tmp_path / "kept"
    together("checkpoints", 4, tmp_path / "whole", tmp_path / "4.pt", kept)
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["step-000000000004"]
    whole = torch.load(tmp_path / "4.pt")
    assert whole.pop("first") == 0
    for size in (2, 1):
        folder = tmp_path / f"from{size}"
        shutil.copytree(kept, folder)
        (folder / "unfinished").mkdir()  # of a process that was killed while it wrote
        together("checkpoints", size, folder, tmp_path / f"{size}.pt")
        found = torch.load(tmp_path / f"{size}.pt")
        assert found.pop("first") == 2
        for name, want in whole.items():
            torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-12)


def test_a_run_that_shards_its_cases_ends_as_one_that_does_not(together, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        toys.train_all(tmp_path / "alone", launch(accelerator="cpu", devices=1))
    finally:
        torch.set_default_dtype(torch.float32)
    together("toys", 2, tmp_path / "together", "ddp")
    for name in toys.RECIPES:
        ours, theirs = (read_outcome(tmp_path / each / name) for each in ("together", "alone"))
        assert ours.value == pytest.approx(theirs.value)
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            assert one == pytest.approx(other, rel=1e-6)  # sums of a round are in float32
        for key, want in theirs.weights.items():
            torch.testing.assert_close(ours.weights[key], want, rtol=1e-9, atol=1e-11)
