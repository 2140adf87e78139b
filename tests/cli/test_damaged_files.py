"""Damaged files on the command line: exit code 2 and a line with the file, never a traceback."""

import numpy as np
import pytest

from primal_attention.tasks import load_uea

from .command import primal, sets, told

HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000000, 12, 20), }"
TOKENS = b"{'descr': '<f8', 'fortran_order': False, 'shape': ((1, 12, 20), "
OVERFLOW = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1e999, 12, 20), }"


def npy(head):
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


@pytest.mark.parametrize(
    "content", [b"", npy(HUGE), npy(TOKENS), npy(OVERFLOW), b"PK\3\4", b"\x80\x04N."], ids=range(6)
)
def test_predicting_from_a_damaged_array(trained, tmp_path, content):
    (tmp_path / "new.npy").write_bytes(content)
    result = primal("predict", "new.npy", "--checkpoint", trained)
    assert result.exit_code == 2
    message = told(result)
    assert "FILE: new.npy is not a whole .npy file of series (" in message
    assert message.endswith("[cases, channels, length]") or "numpy.save" in message
    assert "Traceback" not in message and "Aborted" not in message
    assert not (tmp_path / "predictions.csv").exists()


def test_predicting_from_no_cases(trained, tmp_path):
    np.save(tmp_path / "new.npy", np.zeros((0, 12, 20)))
    result = primal("predict", "new.npy", "--checkpoint", trained)
    assert result.exit_code == 2
    assert "new.npy must hold numbers [cases, channels, length], got shape (0, 12, 20)" in told(
        result
    )


def test_many_short_cases_are_predicted_a_few_at_a_time(trained, tmp_path):
    """The number of the case is that of the file."""
    cases = np.zeros((130, 12, 2), np.float32)
    np.save(tmp_path / "new.npy", cases)
    assert primal("predict", "new.npy", "--checkpoint", trained).exit_code == 0
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 131
    cases[128, 3] = np.inf
    np.save(tmp_path / "new.npy", cases)
    result = primal("predict", "new.npy", "--checkpoint", trained, "--out", "no.csv")
    assert result.exit_code == 2 and not (tmp_path / "no.csv").exists()
    assert "new.npy" in told(result)
    assert "case 128, channel 3 has an infinite" in told(result)


def test_training_on_a_damaged_set(tmp_path):
    folder = tmp_path / "data" / "uea"
    folder.mkdir(parents=True)
    path = folder / "JapaneseVowels_TRAIN.ts"
    for each in (path, folder / "JapaneseVowels_TEST.ts"):
        each.write_bytes(npy(HUGE))
    result = primal("train", "uea/JapaneseVowels", "--model", "linear", *sets("epochs=1"))
    assert result.exit_code == 2
    assert f"{path}, line 1: a header line starts with" in told(result)
    path.unlink()
    assert load_uea("JapaneseVowels")  # as without it


@pytest.mark.parametrize(
    ("domain", "name", "file"),
    [
        ("lra", "listops", "basic_train.tsv"),
        ("lra", "image", "cifar10_grey.npz"),
        ("lra", "retrieval", "new_aan_pairs.train.tsv"),
        ("language", "wikitext-2", "wiki.train.tokens"),
        ("rl", "hopper-medium", "hopper-medium.hdf5"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"\xff" * 99])
def test_preparing_damaged_files(tmp_path, domain, name, file, content):
    for each in (file, *(file.replace("train", part) for part in ("val", "valid", "eval", "test"))):
        (tmp_path / each).write_bytes(content)
    result = primal("data", domain, name, "--folder", tmp_path)
    assert result.exit_code == 2
    assert file in told(result).replace(" ", "")
    assert not (tmp_path / f"{name}.npz").exists()
