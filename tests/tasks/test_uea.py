import subprocess
import sys

import numpy as np
import pytest
import torch

from primal_attention.tasks import UEA_SETS, load_uea, uea_task

HEADER = "@equalLength false\n@dimensions 2\n@classLabel true up down\n@data\n"
TRAIN = HEADER + "1,2,3:4,5,?:up\n5,7:1,2:down\n2,4:3,1:up\n0:1:down\n"
TEST = HEADER + "1,1,1,1:2,2,2,2:down\n"


def put(place, name="Toy", train=TRAIN, test=TEST):
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}_TRAIN.ts").write_text(train)
    (place / f"{name}_TEST.ts").write_text(test)


def assert_same(parts, others):
    for part, other in zip(parts, others, strict=True):
        assert part.labels.tolist() == other.labels.tolist()
        for case, same in zip(part.series, other.series, strict=True):
            assert case.dtype == same.dtype == np.float32
            np.testing.assert_array_equal(case, same)


def test_the_archive_has_thirty_sets():
    assert len(set(UEA_SETS)) == 30
    assert list(UEA_SETS) == sorted(UEA_SETS)


@pytest.mark.parametrize("inner", ["", "Toy"])
def test_files_of_any_name_are_read_from_the_folder(tmp_path, inner):
    put(tmp_path / inner)
    train, test = load_uea("Toy", tmp_path)
    assert [case.shape for case in train.series] == [(2, 3), (2, 2), (2, 2), (2, 1)]
    assert train.labels.tolist() == ["up", "down", "up", "down"]
    assert [case.shape for case in test.series] == [(2, 4)] and test.labels.tolist() == ["down"]


def test_the_folder_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    put(tmp_path / "data" / "uea" / "Toy")
    assert len(load_uea("Toy")[0].series) == 4
    put(tmp_path / "elsewhere" / "uea" / "Toy", train=TRAIN + "1:1:up\n")
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path / "elsewhere"))
    assert len(load_uea("Toy")[0].series) == 5


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_corrupt_file_is_named(tmp_path, part):
    text = {"train": TRAIN, "test": TEST}[part][:-4]
    put(tmp_path / "Toy", **{part: text})
    number = len(text.splitlines())
    with pytest.raises(ValueError, match=rf"Toy_{part.upper()}\.ts, line {number}: "):
        load_uea("Toy", tmp_path)


def test_a_part_is_missing(tmp_path):
    put(tmp_path / "Heartbeat", "Heartbeat")
    (tmp_path / "Heartbeat" / "Heartbeat_TEST.ts").unlink()
    with pytest.raises(FileNotFoundError, match=r"no data. Put .* and Heartbeat_TEST\.ts"):
        load_uea("Heartbeat", tmp_path)


def test_parts_of_different_channels(tmp_path):
    put(tmp_path / "Toy", test="@classLabel true up down\n@data\n1:2:3:up\n")
    with pytest.raises(ValueError, match="2 channels in train, 3 in test"):
        load_uea("Toy", tmp_path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Hartbeat", "Heartbeat"),
        ("japanesevowels", "JapaneseVowels"),
        ("Toys", "Toy"),
        ("", "LSST"),
    ],
)
def test_unknown_names(tmp_path, name, near):
    put(tmp_path / "Toy")
    with pytest.raises(ValueError, match=rf"'{name}' is not a set .* one of .*{near}"):
        load_uea(name, tmp_path)


def test_sets_that_aeon_holds(tmp_path):
    pytest.importorskip("aeon")
    train, test = load_uea("JapaneseVowels", tmp_path)
    assert (len(train.series), len(test.series)) == (270, 370)
    assert {len(case) for part in (train, test) for case in part.series} == {12}
    assert (min(c.shape[1] for c in train.series), max(c.shape[1] for c in test.series)) == (7, 29)
    assert sorted(set(train.labels)) == sorted(set(test.labels)) == list("123456789")
    train, test = load_uea("BasicMotions", tmp_path)
    assert (len(train.series), len(test.series), train.series[0].shape) == (40, 40, (6, 100))
    assert list(tmp_path.iterdir()) == []


def test_other_packages_are_not_needed(tmp_path):
    """A fresh interpreter in which neither aeon nor pandas can be imported."""
    put(tmp_path)
    program = (
        "import sys; sys.modules.update(aeon=None, pandas=None, sklearn=None, scipy=None)\n"
        "from pathlib import Path\n"
        "from primal_attention.tasks import uea_task\n"
        "task = uea_task('Toy', folder=Path(sys.argv[1]), valid='test', seed=0)\n"
        "assert len(task.train) == 4\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_the_error_says_what_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"aeon\.datasets\.load_classification") as error:
        load_uea("Heartbeat", tmp_path)
    assert "Heartbeat_TRAIN.ts" in str(error.value)
    assert str(tmp_path / "Heartbeat") in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_set_as_a_task(tmp_path):
    put(tmp_path)
    task = uea_task("Toy", folder=tmp_path, valid="test", seed=0)
    assert (task.name, task.labels) == ("uea/Toy", ("down", "up"))
    assert task.train.inputs["x"].shape == (4, 3, 2) and task.test.inputs["x"].shape == (1, 3, 2)
    assert task.train.target.tolist() == [1, 0, 1, 0] and task.test.target.tolist() == [0]
    assert torch.isfinite(task.train.inputs["x"]).all()
    split = uea_task("Toy", folder=tmp_path, valid=0.5, seed=0)
    assert len(split.train) == len(split.valid) == 2


def test_a_folder_that_is_named_must_be_there(tmp_path):
    """JapaneseVowels comes with aeon, which a wrong path must not fall back to."""
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        load_uea("JapaneseVowels", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
