"""Two processes, each with half of the batch, have the gradients of one process with all of it."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("distributed_worker.py")


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed") / "measured.json"
    for _ in range(3):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", WORKER, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode == 0 or not re.search("SIGABRT|SIGSEGV", done.stderr):
            break  # see tests/training/test_processes.py
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp layers", "fsdp root"])
def test_gradients_equal_those_of_one_process(measured, mode):
    assert len(measured[mode]) == 15  # five kinds of layers, three objectives
    for case, deviation in measured[mode].items():
        assert deviation < 1e-9, case


@pytest.mark.slow
def test_two_checkpointed_towers_equal_those_of_one_process(measured):
    assert len(measured["two towers"]) == 15  # five kinds of layers, three ways to distribute
    for case, deviation in measured["two towers"].items():
        assert deviation < 1e-9, case


@pytest.mark.slow
def test_without_objective_a_frozen_lambda_works(measured):
    assert len(measured["no objective, lambda frozen"]) == 9
    for case, deviation in measured["no objective, lambda frozen"].items():
        assert deviation < 1e-9, case


@pytest.mark.slow
@pytest.mark.parametrize("name, cases", [("no objective", 9), ("patched, no objective", 2)])
def test_without_objective_nothing_need_be_frozen(measured, name, cases):
    assert len(measured[name]) == cases
    for case, deviation in measured[name].items():
        assert deviation < 1e-9, case
