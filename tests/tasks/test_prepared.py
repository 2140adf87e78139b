"""Prepared files of all domains: whole or refused."""

import numpy as np
import pytest

from primal_attention.tasks.language.corpus import TEXTS
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.tasks.offline_rl import RL

from .toy_rl import trajectories
from .toy_text import write_text


def arena(folder):
    tokens = np.random.default_rng(0).integers(256, size=(6, 13), dtype=np.uint8)
    task = PreparedTask("text", PartSizes(3, 1, 2), tokens, np.arange(6, dtype=np.uint8) % 2)
    LRA.write(folder / "text.npz", task)
    return LRA, "text"


def text(folder):
    write_text(folder.parent / "files" / "wikitext-2")
    TEXTS.prepare("wikitext-2", folder.parent / "files", folder)
    return TEXTS, "wikitext-2"


def policies(folder):
    RL.write(folder / "hopper-medium.npz", trajectories())
    return RL, "hopper-medium"


@pytest.fixture(params=[arena, text, policies])
def prepared(request, tmp_path):
    """A domain and a prepared file of it, in a folder that was not there."""
    sets, name = request.param(tmp_path / "made" / "here")
    return sets, tmp_path / "made" / "here" / f"{name}.npz"


def arrays_of(path):
    with np.load(path) as arrays:
        return dict(arrays)


def test_what_is_read_can_be_written_again(prepared):
    sets, path = prepared
    before = arrays_of(path)
    sets.write(path.with_name("again.npz"), sets.read(path))
    again = arrays_of(path.with_name("again.npz"))
    assert before.keys() == again.keys()
    for name, array in before.items():
        assert array.dtype == again[name].dtype and array.tobytes() == again[name].tobytes()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ZeroDivisionError()])
def test_an_interrupted_write_leaves_the_older_file(prepared, monkeypatch, error):
    sets, path = prepared
    before, found = path.read_bytes(), sets.read(path)

    def interrupted(file, **arrays):
        file.write(b"PK half")
        raise error

    monkeypatch.setattr(np, "savez", interrupted)
    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(type(error)):
        sets.write(path, found)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def assert_not_whole(prepared, reason=""):
    sets, path = prepared
    name = path.name.replace(".", r"\.")
    with pytest.raises(ValueError, match=f"{name} is not a whole prepared .*{reason}") as error:
        sets.read(path)
    assert "; delete it, and write it anew with" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_cut_off(prepared):
    whole = prepared[1].read_bytes()
    for size in (*range(0, len(whole), len(whole) // 29), len(whole) - 1):
        prepared[1].write_bytes(whole[:size])
        assert_not_whole(prepared)


def test_foreign_files(prepared):
    path = prepared[1]
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_not_whole(prepared)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert_not_whole(prepared)
    np.savez(path, x=np.zeros(3))
    assert_not_whole(prepared, "it has no array")
    others = {"format": np.array("other"), "about": np.array('{"format": "other"}')}
    np.savez(path, **others)
    assert_not_whole(prepared, "its format is 'other'")


def test_nothing_is_unpickled(prepared):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("a pickle was loaded",)

    path = prepared[1]
    for name, array in (before := arrays_of(path)).items():
        np.savez(path, **before | {name: np.array([Bomb()] * max(1, array.size), dtype=object)})
        assert_not_whole(prepared, "objects")
