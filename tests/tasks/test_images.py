"""Pictures: their folders, decoding and splits."""

import numpy as np
import pytest
import torch
from PIL import Image

from primal_attention.tasks import find_images, images_task
from primal_attention.tasks.images import (
    AUGMENTATIONS,
    IMAGENET_100,
    Augmentation,
    load_images,
    read_folder,
    task,
)
from primal_attention.tasks.images.cases import CENTRE, Encoded, decoded

from .toy_pictures import CLASSES, SIDE, write_pictures

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A folder with a set called toy."""
    return write_pictures(tmp_path / "toy").parent


def pixels(encoded, size=SIDE):
    return decoded(encoded, range(len(encoded)), size)


# Folders


def test_classes_are_the_folders(folder):
    (folder / "toy" / "train" / "cats" / "notes.txt").write_text("no picture")
    found = load_images("toy", folder)
    assert found.classes == CLASSES
    assert found.train.labels.tolist() == [0] * 11 + [1] * 11 + [2] * 11
    assert found.test.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert found.train.paths[12] == folder / "toy" / "train" / "cats" / "001.png"
    with Image.open(folder / "toy" / "val" / "dogs" / "003.png") as image:
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(pixels(found.test)[13], expected)


def test_test_stands_in_for_val(folder):
    (folder / "toy" / "val").rename(folder / "toy" / "test")
    assert len(load_images("toy", folder).test) == 15
    write_pictures(folder / "other")
    (folder / "other" / "val").rename(folder / "toy" / "val")
    (folder / "toy" / "val" / "cats" / "000.png").unlink()
    assert len(load_images("toy", folder).test) == 14


def test_tiny_imagenet_as_it_is_handed_out(tmp_path):
    write_pictures(tmp_path / "tiny", suffix="JPEG")
    tiny, lines = tmp_path / "tiny", []
    (tiny / "val" / "images").mkdir()
    for i, path in enumerate(sorted((tiny / "val").glob("*/*.JPEG"))):
        name = f"val_{(7 * i) % 15}.JPEG"
        lines.append(f"{name}\t{path.parent.name}\t0\t32\t44\t62\n")
        path.rename(tiny / "val" / "images" / name)
    (tiny / "val" / "val_annotations.txt").write_text("".join(lines))
    for name in CLASSES:
        (tiny / "val" / name).rmdir()
        train = tiny / "train" / name
        (train / "images").mkdir()
        for path in train.glob("*.JPEG"):
            path.rename(train / "images" / path.name)
        (train / f"{name}_boxes.txt").write_text("0 1 2 3\n")
    found = read_folder(tiny)
    assert (len(found.train), len(found.test)) == (33, 15)
    assert found.test.paths[7] == tiny / "val" / "images" / "val_4.JPEG"
    assert found.test.labels[7] == 1
    (tiny / "val" / "val_annotations.txt").write_text("".join(lines[:5]))
    with pytest.raises(ValueError, match=r"val_annotations\.txt has no picture of the class cats"):
        read_folder(tiny)
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt, line 1"):
        read_folder(tiny)


def test_imagenet_100_is_a_part_of_imagenet(tmp_path):
    assert len(set(IMAGENET_100)) == 100
    assert list(IMAGENET_100) == sorted(IMAGENET_100)
    names = ("n00000001", *IMAGENET_100)
    write_pictures(tmp_path / "imagenet-1k", (1, 1), names, width=3, height=3)
    assert load_images("imagenet-100", tmp_path).classes == IMAGENET_100
    assert len(load_images("imagenet-1k", tmp_path).classes) == 101
    write_pictures(tmp_path / "imagenet-100", (1, 1))
    assert load_images("imagenet-100", tmp_path).classes == CLASSES
    write_pictures(tmp_path / "tiny-imagenet-200", (1, 1), [f"n{i:03}" for i in range(101)])
    assert load_images("tiny-imagenet-100", tmp_path).classes[-1] == "n099"


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Did you mean imagenet-100 or.*train/<class>"):
        load_images("imagenet100", tmp_path)
    assert find_images("toy", folder / "toy") == folder / "toy"
    (folder / "toy" / "val").rename(folder / "toy" / "values")
    with pytest.raises(FileNotFoundError, match="toy has neither val nor test"):
        load_images("toy", folder)
    with pytest.raises(FileNotFoundError, match="train is missing"):
        write_pictures(tmp_path / "b")
        (tmp_path / "b" / "train").rename(tmp_path / "b" / "trains")
        read_folder(tmp_path / "b")


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_class_without_pictures_is_named(folder, part):
    for path in (folder / "toy" / part / "cats").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=f"{part}/cats has no picture"):
        load_images("toy", folder)


# Decoding


@pytest.fixture
def encoded_of(tmp_path):
    """Write a picture to a file."""

    def encoded(image, kind="PNG"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.{kind}"
        image.save(path, kind)
        return Encoded([path], np.zeros(1, np.int64))

    return encoded


def test_grey_pictures_have_three_channels(encoded_of):
    grey = np.random.default_rng(0).integers(256, size=(7, 7)).astype(np.uint8)
    for image in (Image.fromarray(grey), Image.fromarray(grey).convert("RGBA")):
        found = pixels(encoded_of(image), 7)[0]
        assert torch.equal(found, torch.from_numpy(grey).expand(3, 7, 7))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_the_centre_of_a_picture_that_is_no_square(encoded_of, kind):
    """Red at the centre, blue at both ends."""
    image = Image.new("RGB", (44, 22), (0, 0, 250))
    image.paste((250, 0, 0), (11, 0, 33, 22))
    red, _, blue = pixels(encoded_of(image, kind), 11)[0].float()
    assert red[:, 2:-2].min() > 235 and blue[:, 2:-2].max() < 15
    upright = pixels(encoded_of(image.rotate(90, expand=True), kind), 11)[0].float()
    assert upright[0, 2:-2].min() > 235


def test_crops_are_taken_from_all_of_the_picture(encoded_of):
    """Its left half, one square twice as high as the box of the centre reaches."""
    image = Image.new("RGB", (44, 22), (0, 0, 250))
    image.paste((250, 0, 0), (0, 0, 22, 22))
    for along, colour in ((0.0, [250, 0, 0]), (1.0, [0, 0, 250])):
        box = torch.tensor([[0.5, 1.0, along, 0.0]])
        found = decoded(encoded_of(image), [0], 11, crops=box)[0, :, :, 2:-2]
        assert found.amin((1, 2)).tolist() == found.amax((1, 2)).tolist() == colour


@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp"])
def test_a_picture_that_is_cut_off_is_named(tmp_path, suffix):
    write_pictures(tmp_path / "toy", suffix=suffix)
    path = tmp_path / "toy" / "train" / "dogs" / f"004.{suffix}"
    path.write_bytes(path.read_bytes()[:-60])
    message = rf"dogs/004\.{suffix} is not a whole picture"
    with pytest.raises(ValueError, match=message):
        images_task("toy", folder=tmp_path, image_size=SIDE, patch_size=7)


# Tasks


def toy_task(folder, **options):
    return images_task("toy", folder=folder, image_size=SIDE, patch_size=7, **options)


def test_pictures_are_held_out_of_train_by_class(folder):
    found = toy_task(folder, valid=0.2, seed=3)
    assert found.name == "images/toy"
    assert (found.sizes.num_tokens, found.sizes.num_outputs) == (10, 3)
    assert [len(each) for each in (found.train, found.valid, found.test)] == [26, 7, 15]
    assert set(found.valid.target.tolist()) == {0, 1, 2}
    kept, held_out, tested = (
        {each.numpy().tobytes() for each in part.inputs["pictures"]}
        for part in (found.train, found.valid, found.test)
    )
    assert (len(kept), len(held_out)) == (26, 7)
    assert not (kept & held_out or kept & tested or held_out & tested)
    again, other = (toy_task(folder, valid=0.2, seed=seed) for seed in (3, 4))
    assert torch.equal(again.valid.inputs["pictures"], found.valid.inputs["pictures"])
    assert not torch.equal(other.valid.inputs["pictures"], found.valid.inputs["pictures"])


def test_the_paper_selects_on_the_pictures_it_reports(folder):
    found = toy_task(folder, valid="test")
    assert len(found.train) == 33
    assert found.valid is found.test


def test_statistics_are_those_of_what_is_trained_on(folder):
    found = toy_task(folder, valid=0.2)
    x = found.train.inputs["pictures"].double() / 255
    assert found.sizes.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert found.sizes.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())


def test_any_resolution(folder):
    found = images_task("toy", folder=folder, image_size=26, patch_size=13)
    assert found.sizes.num_tokens == 5
    assert found.test.inputs["pictures"].shape == (15, 3, 26, 26)


def test_many_pictures_are_decoded_when_they_are_asked_for(folder, monkeypatch):
    monkeypatch.setattr(task, "RESIDENT", 0)
    found = toy_task(folder, valid=0.2, augmentation=AUGMENTATIONS["light"])
    assert not found.train.resident
    indices = torch.tensor([4, 19, 2])
    kept = toy_task(folder, valid=0.2)
    assert found.train[indices].target.tolist() == kept.train.target[indices].tolist()
    whole = load_images("toy", folder).test
    expected = decoded(whole, [1, 14], SIDE, centre=CENTRE)
    assert torch.equal(found.test[torch.tensor([1, 14])].inputs["pictures"], expected)
    drawn = found.to(CPU).train.drawn(indices)
    assert drawn.inputs["pictures"].shape == (3, 3, SIDE, SIDE)
    assert drawn.target.argmax(-1).tolist() == kept.train.target[indices].tolist()
    joined = found.train.joined(found.valid)
    assert (len(joined), len(joined[torch.tensor([32])].target)) == (33, 1)
    moved = joined[torch.tensor([30])].inputs["pictures"]
    assert torch.equal(moved, found.valid[torch.tensor([4])].inputs["pictures"])


def test_cases_are_augmented_where_they_are_trained_on_alone(folder):
    found = toy_task(folder, valid=0.2, augmentation=Augmentation()).to(CPU)
    plain = toy_task(folder, valid=0.2)
    indices = torch.arange(9)
    torch.manual_seed(0)
    drawn = found.train.drawn(indices)
    assert drawn.inputs["pictures"].shape == (9, 3, SIDE, SIDE)
    assert drawn.target.shape == (9, 3)
    assert torch.equal(found.train[indices].inputs["pictures"], plain.train.inputs["pictures"][:9])
    assert torch.equal(plain.train.drawn(indices).target, plain.train.target[:9])
    assert len(found.train.joined(found.valid)) == 33
    assert found.train.joined(found.valid).augmentation == Augmentation()
