"""Writing prepared data where there is no room: one line, and what was whole stays whole."""

import contextlib
import resource
import sys

import pytest

from primal_attention.tasks import prepare_language, prepare_lra
from primal_attention.tasks.offline_rl import RL

from .toy_rl import trajectories
from .toy_text import write_text


@contextlib.contextmanager
def room(size):
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # an import would be cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


def text(source, out):
    write_text(source / "wikitext-2")
    yield
    prepare_language("wikitext-2", source, out)


def generated(source, out):
    yield
    prepare_lra("pathfinder-6", source, out, sizes=(20, 2, 2))


def policies(source, out):
    yield
    RL.write(out / "hopper-medium.npz", trajectories())


KINDS = [text, generated, policies]


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1000])
def test_a_full_disk_leaves_what_was_there(tmp_path, kind, size):
    source, out = tmp_path / "source", tmp_path / "out"
    steps = kind(source, out)
    next(steps)
    assert next(steps, "written") == "written"
    before = files_in(out)
    assert before
    again = kind(tmp_path / "again", out)
    next(again)
    with room(size), pytest.raises(OSError, match=r"cannot write .*free space") as error:
        next(again)
    assert str(out) in str(error.value) and "\n" not in str(error.value)
    assert files_in(out) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_place_of_the_folder_is_named(tmp_path, kind):
    (tmp_path / "out").write_text("mine")
    steps = kind(tmp_path / "source", tmp_path / "out")
    next(steps)
    with pytest.raises(OSError, match=str(tmp_path / "out")) as error:
        next(steps)
    assert "\n" not in str(error.value) and (tmp_path / "out").read_text() == "mine"
