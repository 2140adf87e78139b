import numpy as np
import pytest

from primal_attention.tasks.lra import load_lra
from primal_attention.tasks.lra.cifar import grey, read_image
from primal_attention.tasks.lra.listops import read_listops
from primal_attention.tasks.lra.texts import byte_tokens, read_retrieval, read_text

from .toy_files import (
    colours,
    write_aan,
    write_cifar_binary,
    write_imdb,
    write_listops,
)


def as_bytes(row):
    return bytes(row[row > 0] - 1)


# ListOps

SOURCES = [
    ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ("( ( ( [SM ( ( ( [MED 1 ) 4 ) ] ) ) 3 ) ] )", 5),
    ("7", 7),
]


def test_listops_symbols(tmp_path):
    write_listops(tmp_path, {"train": SOURCES, "val": SOURCES[:1], "test": SOURCES[1:]})
    prepared = read_listops(tmp_path)
    assert prepared.sizes == (3, 1, 2)
    assert prepared.tokens.shape == (6, 2048)
    assert prepared.targets.tolist() == [9, 5, 7, 9, 5, 7]
    rows = [row[row > 0].tolist() for row in prepared.tokens]
    assert rows[:3] == [[12, 3, 10, 15], [14, 13, 2, 5, 15, 4, 15], [8]]


def test_listops_is_cut_at_2000_symbols(tmp_path):
    long = ("[SM " + "1 " * 2500 + "]", 0)
    write_listops(tmp_path, {"train": [long], "val": [long], "test": [long]})
    tokens = read_listops(tmp_path).tokens
    assert ((tokens > 0).sum(axis=1) == 2000).all() and (tokens[:, 2000:] == 0).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("( [FIRST 1 ) 2 ]", 1)], r"basic_val\.tsv .*line 2.*FIRST"),
        ([("1", 1), ("[MAX 1 2 ]", 12)], r"line 3.*digit, got '12'"),
        ([("1", "1\t2")], "line 2"),
    ],
)
def test_wrong_listops_is_named(tmp_path, rows, message):
    write_listops(tmp_path, {"train": SOURCES, "val": rows, "test": SOURCES})
    with pytest.raises(ValueError, match=message):
        read_listops(tmp_path)


def test_listops_needs_its_head(tmp_path):
    write_listops(tmp_path, {"train": SOURCES})
    (tmp_path / "basic_train.tsv").write_text("1\t1\n")
    with pytest.raises(ValueError, match="Source, Target"):
        read_listops(tmp_path)


# Bytes


def test_bytes_are_counted_from_one_and_cut():
    tokens = byte_tokens([b"\x00ab", "é".encode(), b"x" * 5000, b""])
    assert tokens.shape == (4, 4096) and tokens.dtype == np.uint8
    assert tokens[0, :4].tolist() == [1, 98, 99, 0]
    assert tokens[1, :3].tolist() == [0xC3 + 1, 0xA9 + 1, 0]
    assert (tokens[2] > 0).sum() == 4000 and not tokens[3].any()
    with pytest.raises(ValueError, match="not UTF-8"):
        byte_tokens([b"a\xff"])


# Text

FILMS = {
    "train": {"neg": ["tt1", "tt2"], "pos": ["tt3"] * 11},
    "test": {"neg": ["tt4"], "pos": ["tt5", "tt6"]},
}


def test_text_has_the_official_parts_and_no_unlabelled_reviews(tmp_path):
    write_imdb(tmp_path, FILMS, unsup=True)
    prepared = read_text(tmp_path)
    assert prepared.sizes == (13, 0, 3)
    assert prepared.targets.tolist() == [0] * 2 + [1] * 11 + [0, 1, 1]
    assert as_bytes(prepared.tokens[12]).decode() == "tt3 reviewed in train pos 10 é<br />"
    assert as_bytes(prepared.tokens[13]).decode() == "tt4 reviewed in test neg 0 é<br />"


def test_text_names_what_is_missing_or_strange(tmp_path):
    write_imdb(tmp_path, FILMS)
    (tmp_path / "train" / "neg" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"notes\.txt is not called <id>_<rating>"):
        read_text(tmp_path)
    write_imdb(tmp_path / "half", {"train": FILMS["train"]})
    with pytest.raises(FileNotFoundError, match="neg has no reviews"):
        read_text(tmp_path / "half")


# Retrieval

PAIRS = {
    "train": [("1.0", "a", "b", "text of a", "texte de b, é"), ("0.0", "a", "c", "text of a", "")],
    "eval": [("0", "c", "a", "", "text of a")],
    "test": [("1", "d", "a", "d" * 5000, "text of a")],
}


def test_retrieval_keeps_each_text_once(tmp_path):
    write_aan(tmp_path, PAIRS)
    prepared = read_retrieval(tmp_path)
    assert prepared.sizes == (2, 1, 1)
    assert prepared.targets.tolist() == [1, 0, 0, 1]
    assert prepared.pairs.tolist() == [[0, 1], [0, 2], [2, 0], [3, 0]]
    texts = [as_bytes(row).decode() for row in prepared.tokens]
    assert texts == ["text of a", "texte de b, é", "", "d" * 4000]


@pytest.mark.parametrize("row", [("2", "a", "b", "x", "y"), ("1", "a", "b", "x"), ("",)])
def test_wrong_retrieval_is_named(tmp_path, row):
    write_aan(tmp_path, PAIRS | {"eval": [PAIRS["eval"][0], row]})
    with pytest.raises(ValueError, match=r"new_aan_pairs\.eval\.tsv is not .*line 2"):
        read_retrieval(tmp_path)


# Image


def test_image_is_the_same_from_every_distribution(tmp_path):
    batches = colours(4)
    write_cifar_binary(tmp_path / "cifar-10-batches-bin", batches)
    pixels = [grey(data).reshape(-1, 32, 32) for data, _ in batches]
    classes = [labels for _, labels in batches]
    np.savez(
        tmp_path / "cifar10_grey.npz",
        x_train=np.concatenate(pixels[:-1]),
        y_train=np.concatenate(classes[:-1]),
        x_test=pixels[-1],
        y_test=classes[-1],
    )
    found = [read_image(tmp_path / name) for name in ("cifar-10-batches-bin", "cifar10_grey.npz")]
    for each in found:
        assert each.sizes == (18, 2, 4)
        assert each.tokens.tobytes() == found[0].tokens.tobytes()
        assert each.targets.tolist() == np.concatenate(classes).tolist()


def test_grey_is_the_luma():
    colour = np.zeros((3, 3, 1024), dtype=np.uint8)
    colour[0], colour[1, 0], colour[2] = 255, 255, [[10], [20], [30]]
    assert [int(row[5]) for row in grey(colour.reshape(3, 3072))] == [255, 76, 18]


@pytest.mark.parametrize("damage", ["cut", "class", "missing"])
def test_a_damaged_binary_batch_is_named(tmp_path, damage):
    folder = tmp_path / "cifar-10-batches-bin"
    write_cifar_binary(folder, colours(2))
    path = folder / "data_batch_3.bin"
    content = bytearray(path.read_bytes())
    content[0] = 10
    path.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "missing":
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"data_batch_3\.bin"):
        read_image(folder)


def test_a_damaged_grey_array_is_named(tmp_path):
    path = tmp_path / "cifar10_grey.npz"
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"cifar10_grey\.npz is not .* with x_train"):
        load_lra("image", tmp_path)
    x, y = np.zeros((2, 32, 31), np.uint8), np.zeros(2, int)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ValueError, match="uint8"):
        read_image(path)
