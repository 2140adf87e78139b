"""`primal train` on damaged, held or unwritable files: one line, exit code 2, nothing lost."""

import socket
import subprocess
import sys

import pytest
import torch

from primal_attention.atomic_files import HeldError, holding
from primal_attention.cli import train as train_module
from primal_attention.training import Watcher
from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint

from .command import SMALL, TASK, sets, told, train

ARGUMENTS = ["train", TASK, "--model", "linear", *sets(*SMALL), "--save-every", "0", "--quiet"]


class Interrupted(Watcher):
    """Ctrl-C after the second epoch."""

    def round(self, entry):
        if entry["epoch"] == 2:
            raise KeyboardInterrupt


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The directory of a run that was stopped, beside the results of one that is over."""
    assert train("--quiet", "--seed", 1).exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr(train_module, "progress_bar", lambda console: Interrupted())
        assert train("--save-every", 0).exit_code == 130
    (directory,) = (tmp_path / "runs" / TASK / "linear" / "clean").glob("seed0*")
    return directory


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(result, *messages):
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    for message in messages:
        assert message in told(result)


def flip(path):
    data = path.read_bytes()
    middle = 2 * len(data) // 3
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def of_other_sizes(path):
    tensors, facts = read_checkpoint(path)
    write_checkpoint(path, {name: each[:1] for name, each in tensors.items() if each.ndim}, facts)


def without_progress(path):
    tensors, facts = read_checkpoint(path)
    write_checkpoint(path, tensors, {**facts, "progress": {"rounds": [{"epoch": "x"}], "best": 7}})


@pytest.mark.parametrize("harm", [flip, cut, of_other_sizes, without_progress])
def test_a_damaged_checkpoint(stopped, harm):
    harm(stopped / "last.safetensors")
    before = files(stopped)
    assert_refused(train(), "last.safetensors", "take a copy of it, or remove")
    assert {path: before[path] for path in before} == files(stopped)


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"task": 3, "model": []}', "\xff"])
def test_a_damaged_recipe(stopped, content):
    (stopped / "recipe.json").write_text(content, encoding="latin-1")
    assert_refused(train(), "recipe.json is not the recipe of a run", "remove it")


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"recipe": {}}', "\xff", "[" * 100_000])
def test_a_damaged_result(tmp_path, content):
    assert train().exit_code == 0
    (directory,) = (tmp_path / "runs" / TASK / "linear" / "clean").iterdir()
    whole = (directory / "result.json").read_text()
    (directory / "result.json").write_text(content, encoding="latin-1")
    assert_refused(train(), "result.json is not the outcome of a run", "remove it")
    (directory / "result.json").unlink()
    assert train().exit_code == 0  # as the remedy says
    assert '"value"' in whole and (directory / "result.json").exists()


def test_the_weights_of_a_run_that_is_over(tmp_path):
    assert train().exit_code == 0
    (directory,) = (tmp_path / "runs" / TASK / "linear" / "clean").iterdir()
    whole = read_checkpoint(directory / "best.safetensors")
    flip(directory / "best.safetensors")
    assert_refused(train(), "best.safetensors is damaged", "remove it and run what wrote it again")
    (directory / "best.safetensors").unlink()
    assert train().exit_code == 0  # as the remedy says
    again = read_checkpoint(directory / "best.safetensors")
    assert again.facts == whole.facts
    assert all(torch.equal(each, whole.tensors[name]) for name, each in again.tensors.items())


def test_damaged_metrics_are_written_anew(stopped, tmp_path):
    (stopped / "metrics.csv").write_bytes(b"\xff,")
    assert train().exit_code == 0
    assert len((stopped / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("change", [lambda data: data[:-5], lambda data: data + b"\xff\n"])
def test_damaged_results_are_noticed_before_the_training(stopped, tmp_path, change):
    results = tmp_path / "runs" / "results.csv"
    results.write_bytes(change(results.read_bytes()))
    before = files(tmp_path / "runs")
    assert_refused(train(), "results.csv is no whole file of results", "mend or remove that line")
    assert files(tmp_path / "runs") == before


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert_refused(train("--out", "file"), "cannot write file", "choose another place")
    assert_refused(train("--out", "/sys/runs"), "cannot write /sys/runs", "choose another place")


LIMITED = """
import resource, sys
from primal_attention import cli
sys.dont_write_bytecode = True  # an import would leave a file that is cut off
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
cli.main()
"""


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_disk_that_is_full(stopped, tmp_path, limit):
    """Files may have no more than so many bytes: the error of writing is as on a full disk."""
    before = files(tmp_path / "runs")
    command = [sys.executable, "-c", LIMITED, str(limit), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: cannot write runs/")
    assert "File too large; free space" in line
    assert (stopped / "recipe.json").read_bytes() == before[stopped / "recipe.json"]
    for name in ("last.safetensors", "best.safetensors"):
        assert read_checkpoint(stopped / name)  # of before, or of a later epoch that had room
    assert not list(stopped.glob(".*"))
    assert train().exit_code == 0  # once there is room


HOLDING = """
import sys, time
from pathlib import Path
from primal_attention.atomic_files import holding
with holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("place", ["run", "results"])
def test_a_process_is_told_who_writes_there_until_that_one_is_killed(stopped, tmp_path, place):
    held = stopped if place == "run" else tmp_path / "runs" / "results.csv"
    command = [sys.executable, "-c", HOLDING, held]
    before = files(stopped)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            if place == "run":
                result = train("--quiet")
                assert_refused(result, f"is held by process {other.pid} on {socket.gethostname()}")
                assert len(result.stderr.splitlines()) == 1
            else:
                refused = pytest.raises(HeldError, match=f"is held by process {other.pid} on ")
                with refused, holding(held, wait=0.1):
                    raise AssertionError
        finally:
            other.kill()
    lock = stopped / ".lock" if place == "run" else tmp_path / "runs" / ".results.csv.lock"
    assert {path: data for path, data in files(stopped).items() if path != lock} == before
    assert lock.exists()  # as the killed process left it; it holds nothing
    assert train("--quiet").exit_code == 0
    assert not lock.exists()
