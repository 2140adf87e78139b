"""Checkpoints: whole or not at all, and reading one runs no code."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from primal_attention.atomic_files import remove_unfinished
from primal_attention.training import train_in
from primal_attention.training.checkpoint import (
    FORMAT,
    read_checkpoint,
    write_checkpoint,
)

from .toy import one_process, toy_recipe, toy_task

OLD = "primal-attention 1"  # without a checksum
TENSORS = {
    "model.a": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
    "model.b": torch.tensor(3, dtype=torch.int64),
    "best.a": torch.randn(5, dtype=torch.float64),
    "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
}
FACTS = {"rounds": [{"loss": 0.1 + 0.2, "epoch": 3}], "best": -1, "text": "é"}


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, TENSORS, FACTS)
    found = read_checkpoint(path)
    assert found.facts == FACTS
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].view(-1)[:1], tensor.reshape(-1)[:1])
    assert torch.equal(found.part("model")["a"], TENSORS["model.a"])
    assert set(found.part("model")) == {"a", "b"}
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_a_writer_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, TENSORS, FACTS)
    whole = path.read_bytes()

    def dies(file, data):
        with file.open("wb") as half:
            half.write(data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", dies)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(path, {}, {})
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


KILLED_BY_ITS_SIZE = """
import pathlib, resource, signal, sys, torch
from primal_attention.training.checkpoint import write_checkpoint
from primal_attention.atomic_files import write_text
directory = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
sys.dont_write_bytecode = True  # an import would leave a file that is cut off
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
if sys.argv[2] == "checkpoint":
    write_checkpoint(directory / "last.safetensors", {"a": torch.zeros(4096)}, {})
write_text(directory / "last.txt", "a" * 8192)
"""


@pytest.mark.parametrize("what", ["checkpoint", "text"])
def test_what_a_killed_writer_left_is_removed(tmp_path, what):
    command = [sys.executable, "-c", KILLED_BY_ITS_SIZE, str(tmp_path), what]
    assert subprocess.run(command, check=False).returncode == -signal.SIGXFSZ
    (tmp_path / ".hidden").touch()
    assert len(list(tmp_path.iterdir())) == 2  # killed in the middle of a file
    remove_unfinished(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [".hidden"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint is at"):
        read_checkpoint(tmp_path / "none.safetensors")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))])
def test_a_pickle_is_refused_and_not_run(tmp_path, save):
    path, crater = tmp_path / "best.safetensors", tmp_path / "crater"
    save({"model.a": Bomb(crater)}, path)
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_checkpoint(path)
    assert not crater.exists()
    pickle.loads(pickle.dumps(Bomb(crater)))
    assert crater.exists()  # it would have


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, TENSORS, FACTS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (None, "was not written by this library: its format is None"),
        ({"format": "pt"}, "its format is 'pt', expected"),
        ({"format": FORMAT}, "damaged: its checksum is another"),
        ({"format": FORMAT, "facts": "{}"}, "damaged: its checksum is another"),
        ({"format": FORMAT, "facts": "{}", "sha256": "0" * 64}, "its checksum is another"),
        ({"format": OLD, "facts": "{}", "sha256": "0" * 64}, "its checksum is another"),
        ({"format": OLD, "facts": "{"}, "is not a whole checkpoint"),
        ({"format": OLD, "facts": json.dumps([1])}, "is not a whole checkpoint"),
        ({"format": OLD, "facts": "[" * 100_000}, "is not a whole checkpoint"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, metadata, told):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(3)}, path, metadata)
    with pytest.raises(ValueError, match=told):
        read_checkpoint(path)


def test_damage_anywhere_is_noticed(tmp_path):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, TENSORS, FACTS)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"last\.safetensors .*; take a copy of it, or remove"):
            read_checkpoint(path)


def test_a_checkpoint_without_a_checksum_is_read_with_a_warning(tmp_path, caplog):
    path = tmp_path / "old.safetensors"
    metadata = {"format": OLD, "facts": json.dumps(FACTS)}
    safetensors.torch.save_file({"a": torch.arange(3)}, path, metadata)
    found = read_checkpoint(path)
    assert found.facts == FACTS and torch.equal(found.tensors["a"], torch.arange(3))
    (message,) = caplog.messages
    assert "old.safetensors was written without a checksum" in message and "\n" not in message
    write_checkpoint(path, *found)
    caplog.clear()
    assert read_checkpoint(path).facts == FACTS and not caplog.messages


@pytest.mark.parametrize("setting", ["dim", "ffn_dim", "num_layers", "num_tokens"])
def test_sizes_that_the_tensors_do_not_have_are_refused_before_memory_is_taken(tmp_path, setting):
    """In a process with 2 GiB more than it has, where a model of that size would not go."""
    outcome = train_in(tmp_path / "run", toy_recipe(epochs=1), toy_task(), one_process())
    best = read_checkpoint(tmp_path / "run" / "best.safetensors")
    facts = dict(best.facts)
    if setting == "num_tokens":
        facts["sizes"] = {**facts["sizes"], setting: 10**9}
    else:
        facts["recipe"] = json.dumps({**json.loads(facts["recipe"]), setting: 2**16 * 2**9})
    assert outcome.weights
    write_checkpoint(tmp_path / "large.safetensors", best.tensors, facts)
    command = [sys.executable, "-c", LOADED_IN_LITTLE_MEMORY, tmp_path / "large.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "large.safetensors is not the checkpoint of a model" in done.stdout


LOADED_IN_LITTLE_MEMORY = """
import pathlib, resource, sys
from primal_attention.training.model_factory import load_trained
kib = int(pathlib.Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (kib * 1024 + 2**31,) * 2)
try:
    load_trained(pathlib.Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""
