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

from primal_attention.training.checkpoint import (
    FORMAT,
    read_checkpoint,
    write_checkpoint,
)
from primal_attention.whole_files import remove_unfinished

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
from primal_attention.whole_files import write_text
directory = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
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
        ({"format": FORMAT}, "damaged facts"),
        ({"format": FORMAT, "facts": "{"}, "damaged facts"),
        ({"format": FORMAT, "facts": json.dumps([1])}, "damaged facts"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, metadata, told):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(3)}, path, metadata)
    with pytest.raises(ValueError, match=told):
        read_checkpoint(path)
