"""Files of data that were made to do harm: refused with their names, before they take anything."""

import struct
import zlib

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from primal_attention.tasks import images_task, load_uea, lra_task, series_task
from primal_attention.tasks.images import find_images
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.tasks.offline_rl import load_rl
from primal_attention.tasks.series import LabelledSeries

from .toy_pictures import write_pictures
from .toy_rl import write_d4rl
from .toy_series import make_series

RL = "hopper-medium"


# hdf5


def endless(file, name):
    """2^40 rows that were never written."""
    file.create_dataset(name, (2**40, 11), "f4", chunks=(2**10, 11))


def one_chunk(file, name):
    file.create_dataset(
        name, (49, 11), "f4", chunks=(2**24, 11), compression="gzip", maxshape=(None, 11)
    )


def soft_link(file, name):
    file[name] = h5py.SoftLink("/actions")


def external_link(file, name):
    file[name] = h5py.ExternalLink("other.hdf5", "/x")


def external_storage(file, name):
    file.create_dataset(name, (49, 11), "f4", external=[("/etc/passwd", 0, 49 * 44)])


def virtual(file, name):
    layout = h5py.VirtualLayout((49, 11), "f4")
    layout[:] = h5py.VirtualSource("other.hdf5", "x", (49, 11))
    file.create_virtual_dataset(name, layout)


def group(file, name):
    file.create_group(name)


def texts(file, name):
    file.create_dataset(name, data=["a"] * 49)


def references(file, name):
    file.create_dataset(name, (49, 11), h5py.ref_dtype)


def nothing(file, name):
    file[name] = h5py.Empty("f4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (endless, "unpacks to more than 256 MiB"),
        (one_chunk, "has chunks of"),
        (soft_link, "is a link"),
        (external_link, "is a link"),
        (external_storage, "no array of the file"),
        (virtual, "no array of the file"),
        (group, "no array of the file"),
        (texts, "not numbers"),
        (references, "not numbers"),
        (nothing, "not numbers"),
        (lambda file, name: None, "has no 'observations'"),
    ],
)
def test_hostile_arrays_of_hdf5_are_refused(tmp_path, change, message):
    path = tmp_path / f"{RL}.hdf5"
    write_d4rl(path, observations=change)
    with pytest.raises(ValueError, match=rf"^{path} is not a whole hdf5 file .*{message}.*anew$"):
        load_rl(RL, tmp_path)


# Pictures


def png(width, height):
    """A picture of zeros, which takes some hundred bytes for a million of them."""
    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", rows)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(each)) + kind + each + struct.pack(">I", zlib.crc32(kind + each))
        for kind, each in [*chunks, (b"IEND", b"")]
    )


def read_pictures(folder):
    return images_task("toy", folder=folder, image_size=16, patch_size=8, valid="test")


@pytest.mark.parametrize("side", [8_200, 20_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_that_unpack_to_far_more_than_they_take_are_refused(tmp_path, side):
    path = write_pictures(tmp_path / "toy", (2, 1)) / "train" / "cats" / "000.png"
    path.write_bytes(png(side, side))
    with pytest.raises(ValueError, match=rf"^{path} is not a whole picture .*pixels.*remove it$"):
        read_pictures(tmp_path)


def test_pictures_of_other_formats_are_refused(tmp_path):
    path = write_pictures(tmp_path / "toy", (2, 1)) / "train" / "cats" / "000.png"
    Image.new("RGB", (9, 9)).save(path, "GIF")
    with pytest.raises(ValueError, match=rf"^{path} is not a whole picture .*cannot identify"):
        read_pictures(tmp_path)


@pytest.mark.parametrize("name", ["../train/cats", "/etc", "..", "a/b"])
def test_lists_name_nothing_outside_of_their_folders(tmp_path, name):
    folder = write_pictures(tmp_path / "toy", (2, 1))
    (folder / "val" / "val_annotations.txt").write_text(f"{name} cats\n")
    with pytest.raises(ValueError, match=rf"val_annotations\.txt names '{name}'"):
        read_pictures(tmp_path)
    assert find_images("toy", tmp_path) == folder


def test_lists_that_name_what_is_missing_are_named(tmp_path):
    folder = write_pictures(tmp_path / "toy", (2, 1))
    lines = "000.png birds\n000.png cats\n000.png dogs\n"
    (folder / "val" / "val_annotations.txt").write_text(lines)
    with pytest.raises(ValueError, match=r"annotations\.txt names the picture '000\.png'.*anew"):
        read_pictures(tmp_path)


def test_lists_that_are_no_text_are_named(tmp_path):
    path = write_pictures(tmp_path / "toy", (2, 1)) / "val/val_annotations.txt"
    path.write_bytes(b"cats\xff\n")
    with pytest.raises(ValueError, match=rf"^{path} is not a text in UTF-8"):
        read_pictures(tmp_path)


# Series


def test_sizes_of_series_that_are_absurd_are_refused(tmp_path):
    head = "@dimensions {}\n@classLabel true a b\n@data\n1,2:3,4:a\n"
    for number in ("100000000000000", "9" * 5000, "3"):
        for part in ("TRAIN", "TEST"):
            (tmp_path / f"Toy_{part}.ts").write_text(head.format(number))
        with pytest.raises(ValueError, match=r"Toy_TRAIN\.ts, line \d: .*(one number|3 channels)"):
            load_uea("Toy", tmp_path)


def test_one_long_case_does_not_make_padding_of_all_memory():
    series = [np.zeros((1, 2**14), np.float32)] + [np.zeros((1, 1), np.float32)] * 2**15
    part = LabelledSeries(series, np.array(["a", "b"] * (len(series) // 2) + ["a"]))
    with pytest.raises(ValueError, match=r"mine is not .* up to 16384 time steps.* 2 GiB"):
        series_task("mine", *part, *part, valid="test", seed=0)


def test_series_that_no_task_can_take_are_named():
    labels = np.array(["a", "b"])
    good = LabelledSeries(make_series((5, 7)), labels)
    other = LabelledSeries(good.series, np.array(["a", "c"]))
    infinite = LabelledSeries([np.full((3, 4), np.inf, np.float32)] * 2, labels)
    for test, message in ((other, r"labels \['c'\]"), (infinite, "infinite")):
        with pytest.raises(ValueError, match=rf"^mine is not a data set .*{message}"):
            series_task("mine", *good, *test, valid="test", seed=0)


# The arena


def test_symbols_that_are_not_of_the_task_are_named(tmp_path):
    path, sizes = tmp_path / "listops.npz", PartSizes(2, 1, 1)
    tokens, targets = np.ones((4, 8), np.uint8), np.zeros(4, np.uint8)
    for changed in (
        PreparedTask("listops", sizes, tokens * 40, targets),
        PreparedTask("listops", sizes, tokens, targets + 10),
        PreparedTask("listops", PartSizes(0, 3, 1), tokens, targets),
    ):
        LRA.write(path, changed)
        with pytest.raises(ValueError, match=rf"^{path} is not a file of 'listops'.*anew$"):
            lra_task("listops", folder=tmp_path)
    LRA.write(path, PreparedTask("listops", sizes, tokens, targets))
    assert torch.equal(lra_task("listops", folder=tmp_path).test.target, torch.zeros(1).long())


def test_pairs_name_sequences_that_are_there():
    tokens, targets = np.zeros((3, 8), np.uint8), np.zeros(4, np.uint8)
    for index in (3, -1):
        pairs = np.full((4, 2), index, np.int32)
        with pytest.raises(ValueError, match="pairs"):
            PreparedTask("retrieval", PartSizes(2, 1, 1), tokens, targets, pairs)


@pytest.mark.parametrize(
    "content", [b"\xff\xfeS\0o\0", b"Source\tTarget\n\xff\t1\n", b"", b"\0" * 99]
)
def test_listops_that_is_no_text_is_named(tmp_path, content):
    for part in ("train", "val", "test"):
        (tmp_path / f"basic_{part}.tsv").write_bytes(content)
    path = tmp_path / "basic_train.tsv"
    with pytest.raises(ValueError, match=rf"^{path} is not a file of ListOps .*anew$"):
        lra_task("listops", folder=tmp_path)


def test_short_lines_do_not_fill_memory_with_padding(tmp_path):
    for part in ("train", "val", "test"):
        (tmp_path / f"basic_{part}.tsv").write_text("Source\tTarget\n" + "1\t1\n" * 200_001)
    with pytest.raises(ValueError, match=r"basic_train\.tsv .*more than 200000 trees"):
        lra_task("listops", folder=tmp_path)


def test_reviews_that_are_no_text_are_named(tmp_path):
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / part / label).mkdir(parents=True)
            (tmp_path / part / label / "0_1.txt").write_bytes(b"a review")
    path = tmp_path / "test" / "neg" / "0_1.txt"
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=f"^{path} is no text in UTF-8"):
        lra_task("text", folder=tmp_path)
    path.write_bytes(bytes(2**20 + 1))
    with pytest.raises(ValueError, match=f"^{path} has 1048577 bytes"):
        lra_task("text", folder=tmp_path)
