import zipfile

import numpy as np
import pytest

from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask


@pytest.fixture
def prepared():
    rng = np.random.default_rng(0)
    return PreparedTask(
        "retrieval",
        PartSizes(3, 2, 2),
        rng.integers(256, size=(5, 13), dtype=np.uint8),
        rng.integers(2, size=7, dtype=np.uint8),
        rng.integers(5, size=(7, 2), dtype=np.int32),
        facts={"seed": 3, "settings": {"p": 0.25}},
    )


@pytest.fixture
def path(tmp_path, prepared):
    LRA.write(tmp_path / "a" / "retrieval.npz", prepared)
    return tmp_path / "a" / "retrieval.npz"


def test_what_is_read_is_what_was_written(path, prepared):
    again = LRA.read(path, "retrieval")
    assert (again.task, again.sizes, again.facts) == ("retrieval", (3, 2, 2), prepared.facts)
    for name in ("tokens", "targets", "pairs"):
        ours, theirs = getattr(again, name), getattr(prepared, name)
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    assert isinstance(again.tokens, np.memmap)


def test_changes_are_not_written_back(path):
    before = path.read_bytes()
    LRA.read(path, "retrieval").tokens[:] = 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("at", ["tokens", "targets", "pairs", "facts"])
def test_a_changed_byte_is_seen(path, prepared, at):
    content = bytearray(path.read_bytes())
    pattern = b'"seed\\": 3' if at == "facts" else getattr(prepared, at).tobytes()
    if at == "facts":
        pattern = "retrieval".encode("utf-32-le")
    content[content.index(pattern)] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"retrieval\.npz is not a whole prepared .* delete it"):
        LRA.read(path, "retrieval")


def test_a_compressed_file_is_seen(path):
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez_compressed(path, **content)
    with pytest.raises(ValueError, match="compressed"):
        LRA.read(path, "retrieval")


def test_the_file_of_another_task_is_seen(path):
    with pytest.raises(ValueError, match="it holds the task 'retrieval'"):
        LRA.read(path, "text")


def test_arrays_must_fit():
    tokens, targets = np.zeros((3, 5), np.uint8), np.zeros(3, np.uint8)
    with pytest.raises(ValueError, match="targets must be 4"):
        PreparedTask("text", PartSizes(2, 1, 1), tokens, targets)
    with pytest.raises(ValueError, match="tokens must be uint8"):
        PreparedTask("text", PartSizes(1, 1, 1), tokens.astype(int), targets)
    with pytest.raises(ValueError, match="3 sequences for 2 cases"):
        PreparedTask("text", PartSizes(1, 1, 0), tokens, targets[:2])
    with pytest.raises(ValueError, match="pairs must be"):
        PreparedTask("text", PartSizes(1, 1, 1), tokens, targets, np.zeros((2, 2), np.int32))


def test_the_members_are_plain_arrays(path):
    """Any program that reads .npz reads it."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with np.load(path) as arrays:
        assert set(arrays.files) == {"about", "tokens", "targets", "pairs"}
