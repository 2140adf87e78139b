import zipfile

import numpy as np
import pytest

from primal_attention.tasks import LabelledSeries
from primal_attention.tasks.uea import UEA

from .toy_series import NAN, make_series


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


def arrays_of(path):
    with np.load(path) as arrays:
        return dict(arrays)


def test_what_is_read_is_bit_for_bit_what_was_written(path, parts):
    for part, again in zip(parts, UEA.read(path), strict=True):
        assert again.labels.tolist() == part.labels.tolist()
        for case, same in zip(part.series, again.series, strict=True):
            assert same.dtype == np.float32 and same.shape == case.shape
            assert same.tobytes() == case.tobytes()


def test_the_folder_is_made(tmp_path, parts):
    UEA.write(tmp_path / "a" / "b" / "Toy.npz", parts)
    assert len(UEA.read(tmp_path / "a" / "b" / "Toy.npz")) == 2


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(tmp_path, parts, monkeypatch, error):
    def interrupted(file, **arrays):
        file.write(b"PK half")
        raise error

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(type(error)):
        UEA.write(tmp_path / "Toy.npz", parts)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_older_file(path, parts, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", lambda file, **arrays: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        UEA.write(path, parts)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def assert_refused(path, reason=""):
    with pytest.raises(ValueError, match=rf"Toy\.npz is not a whole.*{reason}.*prepare_uea"):
        UEA.read(path)


def test_files_that_are_cut_off(path):
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 41), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(path)


def test_values_that_were_changed_on_the_disk(path):
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("train_values.npy")
    whole = bytearray(path.read_bytes())
    whole[info.header_offset + 200] ^= 1
    path.write_bytes(whole)
    assert_refused(path)


def test_foreign_files(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_refused(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert_refused(path)
    np.savez(path, x=np.zeros(3))
    assert_refused(path, "format")


def test_nothing_is_unpickled(path):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("a pickle was loaded",)

    np.savez(path, **arrays_of(path) | {"train_labels": np.array([Bomb()] * 3, dtype=object)})
    assert_refused(path, "objects")
    with path.open("wb") as file:
        np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    assert_refused(path)


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("format", lambda _: np.array("series, version 0"), "version 0"),
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
