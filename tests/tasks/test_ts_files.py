from pathlib import Path

import numpy as np
import pytest

from primal_attention.tasks.ts_files import read_ts

HEADER = "@problemName Toy\n@timeStamps false\n@univariate false\n@dimensions 2\n"
CLASSES = "@equalLength false\n@classLabel true 1.0 -1.0 negativity\n@data\n"
CASES = "1,2,3:4,5,6.5:1.0\n-1e-3,?:NaN,+.5:negativity\n7:8:-1.0\n"
TEXT = HEADER + CLASSES + CASES  # three unequal cases on lines 8 to 10
NAN = np.nan


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "Toy_TRAIN.ts"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_ts(path)

    return read


def assert_toy(result):
    expected = [[[1, 2, 3], [4, 5, 6.5]], [[-1e-3, NAN], [NAN, 0.5]], [[7], [8]]]
    for case, values in zip(result.series, expected, strict=True):
        assert case.dtype == np.float32
        np.testing.assert_array_equal(case, np.array(values, dtype=np.float32))
    assert result.labels.tolist() == ["1.0", "negativity", "-1.0"]


def test_unequal_lengths_missing_values_and_labels(read):
    assert_toy(read(TEXT))


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("\n", "\r\n"),
        TEXT.removesuffix("\n"),
        TEXT.replace("\n", "\n\n"),
        TEXT.replace("\n", " \t\n"),
        TEXT.replace(",", " , ").replace(":", " : "),
        TEXT.replace("@data", "@DATA").replace("@classLabel", "@classlabel"),
        TEXT.replace(":negativity", ":Negativity"),
        TEXT.replace("@dimensions 2\n", ""),
        "\ufeff" + TEXT,
        "#a comment, @data\n" + TEXT.replace("@data\n", "@data\n#another:1\n"),
        b"#Amplitude \xb5V, pp 1\x96 31\n" + TEXT.encode(),
        TEXT.encode().replace(b"@data", b"#Universit\xe9 \xff\xfe\x00\n@data"),
    ],
    ids=range(12),
)
def test_what_archive_files_hold(read, text):
    assert_toy(read(text))


def test_classes_that_differ_in_case_alone_stay_apart(read):
    result = read("@classLabel true A a\n@data\n1:a\n2:A\n")
    assert result.labels.tolist() == ["a", "A"]


def test_labels_are_kept_as_written(read):
    result = read("@classLabel true Standing Bananas_?\n@data\n1:Standing\n2:Bananas_?\n")
    assert result.labels.tolist() == ["Standing", "Bananas_?"]


def test_values_are_rounded_once(read):
    text = "0.1000000014901161194"  # just above the float32 nearest to 0.1
    assert read(f"@classLabel true a\n@data\n{text}:a\n").series[0][0, 0] == np.float32(text)


def corrupt(old, new):
    assert old in TEXT
    return TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (corrupt("6.5:1.0", "6.5:0"), 8, "label '0' is not one of"),
        (corrupt("6.5:1.0", "6.5:"), 8, "label '' is not one of"),
        (corrupt("7:8", "7"), 10, "2 channels and a label expected, found 1"),
        (corrupt("7:8", "7:8:9"), 10, "2 channels and a label expected, found 3"),
        (corrupt("1,2,3:", "1,2,3;"), 8, "2 channels and a label"),
        (corrupt("@dimensions 2", "@dimensions 3"), 8, "3 channels and a label expected, found 2"),
        (corrupt("@dimensions 2", "@dimensions two"), 4, "@dimensions is followed by one number"),
        (corrupt("@dimensions 2", "@dimensions"), 4, "@dimensions is followed by one number"),
        (corrupt("4,5,6.5", "4,5"), 8, r"different lengths \[3, 2\]"),
        (corrupt("4,5,6.5", "4,x5,6.5"), 8, "value 2 of channel 2, 'x5', is neither"),
        (corrupt("4,5,6.5", "4,,6.5"), 8, "value 2 of channel 2, '', is neither"),
        (corrupt("4,5,6.5", "4,5_0,6.5"), 8, "value 2 of channel 2, '5_0'"),
        (corrupt("1,2,3", "1,2,inf"), 8, "value 3 of channel 1, 'inf'"),
        (corrupt("1,2,3", "1,-1e39,3"), 8, "value 2 of channel 1, '-1e39'"),
        (corrupt("1,2,3", "1,1e999,3"), 8, "value 2 of channel 1, '1e999'"),
        (corrupt("1,2,3", "1,(2;3),3"), 8, r"value 2 of channel 1, '\(2;3\)'"),
        (corrupt("1,2,3", "1,2\x003,3"), 8, "value 2 of channel 1"),
        (corrupt("@equalLength false", "@equalLength true"), 9, "2 time steps and the first has 3"),
        (corrupt("@data\n", ""), 7, "a header line starts with @ or #, got '1,2,3"),
        (corrupt("@timeStamps false", "@timeStamps true"), 2, "without time stamps"),
        (corrupt("@data", "@targetLabel true\n@data"), 7, "only labelled series"),
        (corrupt("@classLabel true 1.0 -1.0 negativity\n", ""), 6, "before a line '@classLabel"),
        (corrupt("true 1.0 -1.0 negativity", "false"), 7, "before a line '@classLabel"),
        (HEADER + CLASSES, 7, "without a case"),
        (HEADER, 4, "without a line @data"),
        ("", 0, "without a line @data"),
        ("version https://git-lfs.github.com/spec/v1\n", 1, "a header line starts with"),
        (b"\xfd7zXZ\x00\x00\x04\xe6", 1, "a header line starts with"),
    ],
)
def test_errors_name_the_file_and_the_line(read, text, line, message):
    with pytest.raises(ValueError, match=rf"Toy_TRAIN\.ts, line {line}: .*{message}"):
        read(text)


def test_a_file_that_is_cut_off_anywhere_is_refused_or_read_up_to_a_line(read):
    """Cut within a case is always seen; whole lines that are gone leave no trace."""
    lines = TEXT.splitlines()
    whole = {"\n".join(lines[: 7 + number]): number for number in (1, 2, 3)}
    for cut in range(len(TEXT)):
        text = TEXT[:cut]
        if text.rstrip() in whole:
            assert len(read(text).series) == whole[text.rstrip()]
        else:
            with pytest.raises(ValueError, match=r"Toy_TRAIN\.ts, line \d+: "):
                read(text)


@pytest.mark.parametrize("name", ["JapaneseVowels", "BasicMotions"])
def test_aeon_reads_the_same(name):
    datasets = pytest.importorskip("aeon.datasets")
    folder = Path(datasets.__file__).parent / "data"
    for part in ("TRAIN", "TEST"):
        series, labels = datasets.load_classification(name, split=part)
        result = read_ts(folder / name / f"{name}_{part}.ts")
        assert [label.lower() for label in result.labels] == labels.tolist()
        for ours, theirs in zip(result.series, series, strict=True):
            np.testing.assert_array_equal(ours, np.asarray(theirs, dtype=np.float32))
