"""Prepared files of all domains: whole or refused; and what those of series hold."""

import zipfile

import numpy as np
import pytest

from primal_attention.tasks import LabelledSeries
from primal_attention.tasks.images.folders import PICTURES
from primal_attention.tasks.language.corpus import TEXTS
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.tasks.offline_rl import RL
from primal_attention.tasks.uea import UEA

from .toy_pictures import write_pictures
from .toy_rl import trajectories
from .toy_series import NAN, make_series
from .toy_text import write_text


def series(folder):
    part = LabelledSeries(make_series((7, 2, 11)), np.array(["a", "b", "a"]))
    UEA.write(folder / "Toy.npz", (part, part))
    return UEA, "Toy"


def arena(folder):
    tokens = np.random.default_rng(0).integers(256, size=(6, 13), dtype=np.uint8)
    task = PreparedTask("text", PartSizes(3, 1, 2), tokens, np.arange(6, dtype=np.uint8) % 2)
    LRA.write(folder / "text.npz", task)
    return LRA, "text"


def pictures(folder):
    write_pictures(folder.parent / "files" / "toy", (3, 2))
    PICTURES.prepare("toy", folder.parent / "files", folder)
    return PICTURES, "toy"


def text(folder):
    write_text(folder.parent / "files" / "wikitext-2")
    TEXTS.prepare("wikitext-2", folder.parent / "files", folder)
    return TEXTS, "wikitext-2"


def policies(folder):
    RL.write(folder / "hopper-medium.npz", trajectories())
    return RL, "hopper-medium"


@pytest.fixture(params=[series, arena, pictures, text, policies])
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


# Series


@pytest.fixture
def parts():
    train, test = make_series((7, 2, 11), seed=1), make_series((5, 13), seed=2)
    train[1][:, 1] = NAN
    test[0][2, 3] = -0.0
    return (
        LabelledSeries(train, np.array(["1.0", "négativité", "1.0"])),
        LabelledSeries(test, np.array(["1.0", "1.0"])),
    )


@pytest.fixture
def path(tmp_path, parts):
    UEA.write(tmp_path / "Toy.npz", parts)
    return tmp_path / "Toy.npz"


def test_what_is_read_is_bit_for_bit_what_was_written(path, parts):
    for part, again in zip(parts, UEA.read(path), strict=True):
        assert again.labels.tolist() == part.labels.tolist()
        for case, same in zip(part.series, again.series, strict=True):
            assert same.dtype == np.float32 and same.shape == case.shape
            assert same.tobytes() == case.tobytes()


def assert_refused(path, reason=""):
    with pytest.raises(ValueError, match=rf"Toy\.npz is not a whole.*{reason}.*prepare_uea"):
        UEA.read(path)


def test_values_that_were_changed_on_the_disk(path):
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("train_values.npy")
    whole = bytearray(path.read_bytes())
    whole[info.header_offset + 200] ^= 1
    path.write_bytes(whole)
    assert_refused(path)


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("format", lambda _: np.zeros(3), "format"),
        ("train_values", lambda a: a[:-1], "values do not fit"),
        ("train_values", lambda a: a.astype(np.float64), "values do not fit"),
        ("test_shapes", lambda a: a * [1, -1], "shapes"),
        ("test_shapes", lambda a: a[:, ::-1], "shapes"),
        ("test_shapes", lambda a: a[:0], ""),
        ("test_shapes", lambda a: a[0], "shapes"),
        ("test_labels", lambda a: a[:1], "labels"),
        ("test_labels", lambda a: np.arange(2), "labels"),
        ("test_labels", None, "test_labels"),
    ],
)
def test_arrays_that_do_not_fit(path, key, change, reason):
    arrays = arrays_of(path)
    array = arrays.pop(key)
    np.savez(path, **arrays, **({key: change(array)} if change else {}))
    assert_refused(path, reason)


def test_parts_with_different_channels(path, parts):
    other = LabelledSeries(make_series((5,), channels=2), np.array(["1.0"]))
    UEA.write(path, (parts[0], other))
    assert_refused(path, "3 channels in train, 2 in test")
