"""A run that was killed, kill -9, at random moments ends as one that was not."""

import json
import multiprocessing
import random
import runpy
import time

import pytest
import torch

from primal_attention.training.checkpoint import read_checkpoint

from .programs import train_one

# Processes are forked from one that has imported what takes seconds and computed nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["primal_attention.training", "lightning_fabric", "torch._dynamo"])
KILLS, LIMIT = 3, 120.0


def begin(directory):
    """A process that trains in the directory."""
    names = {"ARGUMENTS": [str(directory)]}
    process = PROCESSES.Process(target=runpy.run_path, args=(train_one.__file__, names, "__main__"))
    process.start()
    return process


def num_rounds(directory):
    path = directory / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def kill_at_some_moment(process, directory, moments):
    """Wait until the run has got further, a little longer, and kill it."""
    before, began = num_rounds(directory), time.monotonic()
    while process.is_alive() and num_rounds(directory) <= before:
        time.sleep(0.002)
        assert time.monotonic() - began < LIMIT
    time.sleep(moments.uniform(0, 0.05))
    process.kill()
    process.join()
    return process.exitcode


def result(directory):
    found = json.loads((directory / "result.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


@pytest.mark.slow
def test_killed_run_ends_as_if_it_had_not_been(tmp_path):
    train_one.main(tmp_path / "whole")
    directory, moments = tmp_path / "killed", random.Random(7)
    for _ in range(KILLS):
        assert kill_at_some_moment(begin(directory), directory, moments) == -9
    assert not (directory / "result.json").exists()
    last = begin(directory)
    last.join(LIMIT)
    assert last.exitcode == 0
    assert result(directory) == result(tmp_path / "whole")
    texts = [(run / "metrics.csv").read_bytes() for run in (directory, tmp_path / "whole")]
    assert texts[0] == texts[1]
    for name in ("best.safetensors", "last.safetensors", "refit/last.safetensors"):
        ends = [read_checkpoint(run / name).tensors for run in (directory, tmp_path / "whole")]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert (
        sorted(path.name for path in directory.rglob(".*")) == []
    )  # no half-written file, no lock
