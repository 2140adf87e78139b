import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.tasks import UEA_SETS, load_uea, prepare_uea, uea_task

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


@pytest.fixture
def no_aeon(monkeypatch):
    """As if aeon were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "aeon" else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "aeon", None)
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)


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


def test_a_prepared_file_equals_its_source_and_goes_first(tmp_path):
    put(tmp_path / "raw" / "Toy")
    path = prepare_uea("Toy", tmp_path / "raw", tmp_path / "out")
    assert path == tmp_path / "out" / "Toy.npz" and list(path.parent.iterdir()) == [path]
    assert_same(load_uea("Toy", tmp_path / "out"), load_uea("Toy", tmp_path / "raw"))
    put(tmp_path / "out", train=TRAIN + "1:1:up\n")
    assert len(load_uea("Toy", tmp_path / "out")[0].series) == 4
    assert prepare_uea("Toy", tmp_path / "out") == path  # anew, from the files
    assert len(load_uea("Toy", tmp_path / "out")[0].series) == 5


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_corrupt_file_leaves_no_prepared_file(tmp_path, part):
    text = {"train": TRAIN, "test": TEST}[part][:-4]
    put(tmp_path / "Toy", **{part: text})
    number = len(text.splitlines())
    with pytest.raises(ValueError, match=rf"Toy_{part.upper()}\.ts, line {number}: "):
        prepare_uea("Toy", tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_is_missing(tmp_path):
    put(tmp_path / "Heartbeat", "Heartbeat")
    (tmp_path / "Heartbeat" / "Heartbeat_TEST.ts").unlink()
    with pytest.raises(FileNotFoundError, match=r"Heartbeat_TEST\.ts is missing"):
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


def test_a_prepared_file_needs_no_other_package(tmp_path):
    """A fresh interpreter in which neither aeon nor pandas can be imported."""
    put(tmp_path)
    prepare_uea("Toy", tmp_path, tmp_path / "out")
    program = (
        "import sys; sys.modules.update(aeon=None, pandas=None, sklearn=None, scipy=None)\n"
        "from pathlib import Path\n"
        "from primal_attention.tasks import uea_task\n"
        "task = uea_task('Toy', folder=Path(sys.argv[1]), valid='test', seed=0)\n"
        "assert len(task.train) == 4\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=True)


def test_without_aeon_the_error_says_what_to_put_where(tmp_path, no_aeon):
    folder = tmp_path / "data"
    with pytest.raises(FileNotFoundError, match=r"primal-attention\[timeseries\]") as error:
        load_uea("JapaneseVowels", folder)
    assert "JapaneseVowels_TRAIN.ts" in str(error.value)
    assert str(folder / "JapaneseVowels") in str(error.value)
    assert not folder.exists()


@pytest.fixture
def downloads(monkeypatch):
    """Replace the download of aeon; no test goes out to the network."""
    datasets = pytest.importorskip("aeon.datasets")
    return lambda fake: monkeypatch.setattr(datasets, "load_classification", fake)


def test_a_download_is_kept(tmp_path, downloads):
    def fetch(name, *, split, extract_path):
        put(Path(extract_path) / name, name)

    downloads(fetch)
    first = load_uea("Heartbeat", tmp_path / "data")
    downloads(None)
    assert_same(load_uea("Heartbeat", tmp_path / "data"), first)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["Heartbeat"]


def no_network(name, *, split, extract_path):
    raise ValueError("Name or service not known")


def half(name, *, split, extract_path):
    put(Path(extract_path) / name, name, test=TEST[:-4])


@pytest.mark.parametrize(("fetch", "why"), [(no_network, "not known"), (half, "line 5")])
def test_a_download_that_fails_leaves_nothing(tmp_path, downloads, fetch, why):
    downloads(fetch)
    with pytest.raises(FileNotFoundError, match=rf"Put Heartbeat_TRAIN\.ts .*failed: .*{why}"):
        load_uea("Heartbeat", tmp_path / "data" / "uea")
    assert list(tmp_path.iterdir()) == []


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
