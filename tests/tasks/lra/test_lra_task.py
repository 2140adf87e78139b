import numpy as np
import pytest
import torch

from primal_attention.models import Embedding
from primal_attention.tasks import LRA_PROTOCOLS, LRA_TASKS, find_lra, lra_task, prepare_lra
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask

from .toy_files import colours, write_aan, write_cifar_binary, write_imdb, write_listops

NUM_TOKENS = {"image": 1024, "listops": 2048, "text": 4096, "retrieval": 4096, "pathfinder": 1024}


@pytest.fixture
def folder(tmp_path):
    """Every kind of task: distributions and prepared files."""
    root = tmp_path / "data"
    write_listops(
        root / "lra_release" / "listops-1000",
        {part: [("[MAX 1 2 ]", 2)] for part in ("train", "val", "test")},
    )
    films = ["tt1", "tt2", "tt3"] * 10
    by_label = {"neg": films, "pos": films}
    write_imdb(root / "aclImdb", {"train": by_label, "test": by_label})
    rows = [("1", "a", "b", "one text", "another"), ("0", "a", "c", "one text", "third")]
    write_aan(root / "tsv_data", dict.fromkeys(("train", "eval", "test"), rows))
    write_cifar_binary(root / "cifar-10-batches-bin", colours(4))
    images = np.zeros((10, 1024), np.uint8)
    images[:, 3] = 7
    prepared = PreparedTask(
        "pathfinder", PartSizes(8, 1, 1), images, np.arange(10, dtype=np.uint8) % 2
    )
    LRA.write(root / "pathfinder.npz", prepared)
    return root


@pytest.mark.parametrize("protocol", LRA_PROTOCOLS)
@pytest.mark.parametrize("name", NUM_TOKENS)
def test_shapes_types_and_sizes(folder, name, protocol):
    task = lra_task(name, folder=folder, protocol=protocol)
    assert task.name == f"lra/{name}"
    assert task.sizes.num_tokens == NUM_TOKENS[name]
    assert task.sizes.vocab_size == (32 if name == "listops" else 512)
    assert task.sizes.num_outputs == len(task.labels) == (10 if name in ("listops", "image") else 2)
    for part in (task.train, task.valid, task.test):
        assert part.target.dtype == torch.int64 and len(part)
        for key, value in part.inputs.items():
            assert value.shape == (len(part), NUM_TOKENS[name])
            assert value.dtype == (torch.bool if "mask" in key else torch.uint8)


@pytest.mark.parametrize("name", ["image", "pathfinder"])
def test_a_black_pixel_is_padding_in_the_paper_alone(folder, name):
    paper, clean = (lra_task(name, folder=folder, protocol=each) for each in ("paper", "clean"))
    x = paper.train.inputs["x"]
    assert torch.equal(paper.train.inputs["token_mask"], x != 0)
    assert not paper.train.inputs["token_mask"].all()
    assert list(clean.train.inputs) == ["x"]
    assert torch.equal(clean.train.inputs["x"], x)


@pytest.mark.parametrize("protocol", LRA_PROTOCOLS)
def test_padding_is_masked_in_texts(folder, protocol):
    inputs = lra_task("text", folder=folder, protocol=protocol).train.inputs
    assert torch.equal(inputs["token_mask"], inputs["x"] != 0)
    pair = lra_task("retrieval", folder=folder, protocol=protocol).train.inputs
    assert list(pair) == ["a", "mask_a", "b", "mask_b"]
    assert pair["mask_a"].sum(1).tolist() == [len("one text")] * 2
    assert pair["mask_b"].sum(1).tolist() == [len("another"), len("third")]


def test_text_validates_on_test_in_the_paper_and_on_held_out_cases_else(folder):
    paper = lra_task("text", folder=folder, protocol="paper")
    assert paper.valid is paper.test and len(paper.train) == 60
    clean = lra_task("text", folder=folder, protocol="clean", seed=1)
    assert (len(clean.train), len(clean.valid), len(clean.test)) == (54, 6, 60)
    assert clean.valid.target.tolist() == [0] * 3 + [1] * 3
    rows = {bytes(row) for row in clean.train.inputs["x"].numpy()}
    assert not rows & {bytes(row) for row in clean.valid.inputs["x"].numpy()}
    other = lra_task("text", folder=folder, protocol="clean", seed=2)
    assert not torch.equal(other.valid.inputs["x"], clean.valid.inputs["x"])


def test_prepared_files_give_the_same_task(folder, tmp_path):
    for name in ("image", "text", "listops", "retrieval"):
        path = prepare_lra(name, folder, tmp_path / "out")
        assert find_lra(name, tmp_path / "out") == path
        ours, theirs = (lra_task(name, folder=each) for each in (tmp_path / "out", folder))
        for key, value in theirs.train.inputs.items():
            assert torch.equal(ours.train.inputs[key], value)
        assert torch.equal(ours.test.target, theirs.test.target)


def test_image_is_split_in_the_order_of_the_files(folder):
    task = lra_task("image", folder=folder)
    labels = np.concatenate([labels for _, labels in colours(4)])
    assert task.train.target.tolist() == labels[:18].tolist()
    assert task.valid.target.tolist() == labels[18:20].tolist()
    assert task.test.target.tolist() == labels[20:].tolist()


def test_the_folder_may_come_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("PRIMAL_DATA", str(folder))
    assert find_lra("text") == folder / "aclImdb"
    assert prepare_lra("text") == folder / "lra" / "text.npz"
    assert find_lra("text") == folder / "lra" / "text.npz"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("listops", ["basic_train.tsv", "lra_release", "prepare_lra('listops', out="]),
        ("pathfinder", ["generate it with prepare_lra('pathfinder'"]),
        ("text", ["aclImdb", "ai.stanford.edu"]),
        ("retrieval", ["new_aan_pairs.train.tsv", "or take 'retrieval-imdb'"]),
        ("image", ["cifar-10-batches-bin", "cs.toronto.edu"]),
    ],
)
def test_what_is_missing_is_told_with_where_to_get_it(tmp_path, name, messages):
    assert find_lra(name, tmp_path) is None
    with pytest.raises(FileNotFoundError) as error:
        lra_task(name, folder=tmp_path)
    assert all(message in str(error.value) for message in [*messages, str(tmp_path)])


def test_wrong_arguments_are_told(folder):
    with pytest.raises(ValueError, match="did you mean one of pathfinder"):
        lra_task("pathfindr", folder=folder)
    with pytest.raises(ValueError, match="protocol must be one of paper, clean, got 'new'"):
        lra_task("text", folder=folder, protocol="new")
    with pytest.raises(ValueError, match="sizes: 'text' is read from"):
        prepare_lra("text", folder, sizes=PartSizes(1, 1, 1))
    with pytest.raises(FileNotFoundError, match="retrieval: no data"):
        prepare_lra("retrieval", folder / "aclImdb")
    assert set(NUM_TOKENS) < set(LRA_TASKS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_symbols_of_any_integer_type_are_embedded(dtype):
    torch.manual_seed(0)
    embedding = Embedding(5, 7, vocab_size=300)
    x = torch.tensor([[0, 3, 255, 17, 128], [1, 1, 2, 254, 0]])
    assert torch.equal(embedding(x.to(dtype)), embedding(x))
