"""Of processes that train together, those that are left end soon, each with one line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SMALL = ["dim=16", "num_heads=2", "ffn_dim=16", "epochs=100000"]
TRAIN = ["-m", "primal_attention.cli", "train", "uea/JapaneseVowels", "--model", "linear"]
TRAIN += [part for setting in SMALL for part in ("--set", setting)]
TRAIN += ["--save-every", "0", "--accelerator", "cpu", "--quiet"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LIMIT = 30  # seconds


def children(process):
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in path.read_text().split()]


def is_up(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def lines_after_kill(command, folder, victim):
    """What is said on the standard error after one process was killed, and all have ended."""
    errors = folder / "errors"
    with errors.open("w") as file:
        first = subprocess.Popen([sys.executable, *command, "--out", folder], stderr=file)
    every = [first.pid]
    try:
        while not list(folder.rglob("last.safetensors")):
            assert first.poll() is None, errors.read_text()
            time.sleep(0.05)
        every += children(first.pid)
        before = len(errors.read_text())
        os.kill(every[victim], signal.SIGKILL)
        killed = time.monotonic()
        while any(map(is_up, every)):
            assert time.monotonic() - killed < LIMIT
            time.sleep(0.05)
    finally:
        for process in filter(is_up, every):
            os.kill(process, signal.SIGKILL)
        first.wait()
    return errors.read_text()[before:].splitlines()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_other_of_two_processes(tmp_path, strategy, victim):
    command = [*TRAIN, "--devices", "2", "--strategy", strategy]
    lines = lines_after_kill(command, tmp_path, victim)
    assert len(lines) == 1, lines
    line = lines[0]
    lost = f"Error: process {2 - victim} of 2 lost another one, which was ended"
    if line.startswith(lost):
        assert "the same command goes on from the last checkpoint in" in line
    else:  # the second process looks for its launcher too, and may notice that sooner
        assert victim == 0
        assert re.fullmatch(r"Error: process \d+, which started this one, is gone", line)


def test_workers_of_a_torchrun_that_is_gone(tmp_path):
    lines = lines_after_kill([*TORCHRUN, *TRAIN], tmp_path, 0)
    assert lines
    for line in lines:
        assert line.startswith("Error: process ")
        assert "is gone" in line or "lost another one" in line
