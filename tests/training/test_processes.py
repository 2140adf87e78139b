"""Two processes train as one does, and take over each other's runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primal_attention.training import read_outcome, train_in
from primal_attention.training.checkpoint import LAST, read_checkpoint

from .programs.train_toys import RECIPES, Kept
from .toy import one_process, toy_task

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "train_toys.py"
FOLDER = object()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


ABORTED = re.compile(r"SIGABRT|SIGSEGV|terminate called|malloc\(\)|Segmentation fault")


def run_in(make_folder, *command):
    """The folder of a program that ran to its end: FOLDER in the command stands for it.

    Of 46 two-process programs with fsdp on the CPU three died of a signal, two of them after
    their last line, and another time one died with a damaged heap inside a collective. The cause
    is not established. A run that dies so is repeated in another folder; one that ends with a
    Python error or with wrong numbers is not.
    """
    for _ in range(4):
        folder = make_folder()
        words = [folder if word is FOLDER else word for word in command]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)
        if done.returncode == 0 or not ABORTED.search(done.stderr):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs of one process, and each with its checkpoint of the second epoch."""
    folder = tmp_path_factory.mktemp("alone")
    for name, recipe in RECIPES.items():
        directory = folder / name
        train_in(
            directory, recipe, toy_task(), one_process(), watcher=Kept(directory), save_every=0
        )
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory, alone):
    """The runs of two processes, once for each strategy; softmax goes on from one process."""

    def make_folder():
        folder = tmp_path_factory.mktemp("together")
        for strategy in ("ddp", "fsdp"):
            shutil.copytree(alone / "softmax" / "second", folder / strategy / "softmax")
        return folder

    return run_in(make_folder, *TORCHRUN, PROGRAM, FOLDER, "2", "ddp", "fsdp")


def assert_close(a, b):
    assert len(a.rounds) == len(b.rounds) == 5
    for ours, theirs in zip(a.rounds, b.rounds, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # sums of a round are in float32
    assert (a.value, a.valid, a.best) == pytest.approx((b.value, b.valid, b.best))
    assert_tensors_close(a.weights, b.weights)


def assert_tensors_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_train_as_one(alone, together, strategy, name):
    assert_close(read_outcome(together / strategy / name), read_outcome(alone / name))
    ends = [read_checkpoint(run / name / LAST) for run in (together / strategy, alone)]
    assert_tensors_close(ends[0].tensors, ends[1].tensors)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_takes_over_from_two(alone, together, strategy):
    name = "primal_plus"
    second = together / strategy / name / "second"
    assert len(read_checkpoint(second / LAST).facts["progress"]["rounds"]) == 2
    outcome = train_in(second, RECIPES[name], toy_task(), one_process())
    assert_close(outcome, read_outcome(alone / name))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_took_over_from_one(alone, together, strategy):
    """Runs of softmax, whose ends are compared above."""
    began = [run / "softmax" / "began_after" for run in (alone, together / strategy)]
    assert [path.read_text() for path in began] == ["0", "2"]


def test_processes_that_are_launched_here(tmp_path_factory, alone):
    folder = run_in(lambda: tmp_path_factory.mktemp("here"), PROGRAM, FOLDER, "2", "ddp")
    for name in RECIPES:
        assert_close(read_outcome(folder / "ddp" / name), read_outcome(alone / name))
