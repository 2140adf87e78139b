"""Pictures: their folders, prepared files, decoding, splits and augmentation."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from primal_attention.tasks import find_images, images_task, prepare_images
from primal_attention.tasks.images import (
    AUGMENTATIONS,
    IMAGENET_100,
    Augmentation,
    cache,
    load_images,
    read_folder,
    task,
)
from primal_attention.tasks.images.augmentation import erase, flip
from primal_attention.tasks.images.boxes import crop, draw_crops, inside, relative_boxes
from primal_attention.tasks.images.cases import CENTRE
from primal_attention.tasks.images.decoding import decoded
from primal_attention.tasks.images.mixing import mix, smoothed
from primal_attention.tasks.images.randaugment import NAMES, apply, rand_augment

from .toy_pictures import CLASSES, SIDE, write_pictures

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A folder with a set called toy."""
    return write_pictures(tmp_path / "toy").parent


def pixels(encoded, size=SIDE):
    return decoded(encoded, range(len(encoded)), size)


def random_pictures(count, side=19, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, side, side), generator=generator).float()


# Folders


def test_classes_are_the_folders(folder):
    (folder / "toy" / "train" / "cats" / "notes.txt").write_text("no picture")
    found = load_images("toy", folder)
    assert found.classes == CLASSES
    assert found.train.labels.tolist() == [0] * 11 + [1] * 11 + [2] * 11
    assert found.test.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert found.train.name(12).endswith("train/cats/001.png")
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
    assert found.test.name(7).endswith("val/images/val_4.JPEG")
    assert found.test.labels[7] == 1
    (tiny / "val" / "val_annotations.txt").write_text("".join(lines[:5]))
    with pytest.raises(ValueError, match=r"val_annotations\.txt has no picture of the class cats"):
        read_folder(tiny)
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt, line 1"):
        read_folder(tiny)


def test_a_list_of_classes(folder):
    (folder / "toy" / "classes.txt").write_text("dogs some dogs\n\nbirds\n")
    found = load_images("toy", folder)
    assert found.classes == ("birds", "dogs")
    assert found.test.name(5).endswith("val/dogs/000.png")
    (folder / "toy" / "classes.txt").write_text("birds\nfish\n")
    with pytest.raises(ValueError, match="fish is missing"):
        load_images("toy", folder)
    (folder / "toy" / "classes.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"classes\.txt names no class"):
        load_images("toy", folder)


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


def encoded_of(image, kind="PNG"):
    data = io.BytesIO()
    image.save(data, kind)
    return cache.Encoded(lambda _: data.getvalue(), lambda _: "it", np.zeros(1, np.int64))


def test_grey_pictures_have_three_channels():
    grey = np.random.default_rng(0).integers(256, size=(7, 7)).astype(np.uint8)
    for image in (Image.fromarray(grey), Image.fromarray(grey).convert("RGBA")):
        found = pixels(encoded_of(image), 7)[0]
        assert torch.equal(found, torch.from_numpy(grey).expand(3, 7, 7))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_the_centre_of_a_picture_that_is_no_square(kind):
    """Red at the centre, blue at both ends."""
    image = Image.new("RGB", (44, 22), (0, 0, 250))
    image.paste((250, 0, 0), (11, 0, 33, 22))
    red, _, blue = pixels(encoded_of(image, kind), 11)[0].float()
    assert red[:, 2:-2].min() > 235 and blue[:, 2:-2].max() < 15
    upright = pixels(encoded_of(image.rotate(90, expand=True), kind), 11)[0].float()
    assert upright[0, 2:-2].min() > 235


def test_crops_are_taken_from_all_of_the_picture():
    """Its left half, one square twice as high as the box of the centre reaches."""
    image = Image.new("RGB", (44, 22), (0, 0, 250))
    image.paste((250, 0, 0), (0, 0, 22, 22))
    for along, colour in ((0.0, [250, 0, 0]), (1.0, [0, 0, 250])):
        box = torch.tensor([[0.5, 1.0, along, 0.0]])
        found = decoded(encoded_of(image), [0], 11, crops=box)[0, :, :, 2:-2]
        assert found.amin((1, 2)).tolist() == found.amax((1, 2)).tolist() == colour


@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp"])
def test_a_picture_that_is_cut_off_is_named_and_leaves_nothing(tmp_path, suffix):
    write_pictures(tmp_path / "toy", suffix=suffix)
    path = tmp_path / "toy" / "train" / "dogs" / f"004.{suffix}"
    path.write_bytes(path.read_bytes()[:-60])
    message = rf"dogs/004\.{suffix} is not a whole picture"
    with pytest.raises(ValueError, match=message):
        prepare_images("toy", tmp_path)
    with pytest.raises(ValueError, match=message):
        images_task("toy", folder=tmp_path, image_size=SIDE, patch_size=7)
    assert [each.name for each in tmp_path.iterdir()] == ["toy"]


# Prepared files


def test_a_prepared_file_holds_the_same(folder, tmp_path):
    path = prepare_images("toy", folder, tmp_path / "out")
    assert path == tmp_path / "out" / "toy.npz"
    plain, packed = load_images("toy", folder), load_images("toy", tmp_path / "out")
    assert packed.classes == plain.classes
    for ours, theirs in ((packed.train, plain.train), (packed.test, plain.test)):
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert [ours.read(i) for i in range(len(ours))] == [
            theirs.read(i) for i in range(len(theirs))
        ]
    assert packed.test.name(3) == f"{path}, picture 3 of test"
    assert find_images("toy", tmp_path / "out") == path


def test_a_damaged_file_is_refused(folder):
    path = prepare_images("toy", folder)
    whole = path.read_bytes()
    place = whole.index(b"IDAT") + 9
    for wrong in (whole[:-100], b"", whole[:place] + b"?" + whole[place + 1 :]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"toy\.npz is not a whole prepared set .*delete it"):
            load_images("toy", folder)
    with np.load(io.BytesIO(whole)) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, array, message in (
        ("train_ends", arrays["train_ends"][:-1], "train do not fit their number"),
        ("test_bytes", arrays["test_bytes"][:-1], "test do not fit their number"),
        ("test_ends", arrays["test_ends"][[1, 0, *range(2, 15)]], "test do not fit"),
        ("test_labels", arrays["test_labels"] // 2, "classes are not those of test"),
    ):
        np.savez(path, **arrays | {name: array})
        with pytest.raises(ValueError, match=message):
            load_images("toy", folder)
    np.savez(path, format=np.array("something else"))
    with pytest.raises(ValueError, match="its format is 'something else'"):
        load_images("toy", folder)


def test_a_set_that_is_too_large_is_not_packed(folder, monkeypatch):
    monkeypatch.setattr(cache, "MOST", 9_000)
    with pytest.raises(ValueError, match="is not prepared but read from its folder"):
        prepare_images("toy", folder)
    assert not list(folder.glob("*.npz"))


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


# Boxes


@given(
    st.floats(0.01, 1.0), st.floats(0.2, 5.0), st.floats(0, 1), st.floats(0, 1), st.integers(5, 40)
)
def test_boxes_lie_in_the_picture(area, ratio, along, down, size):
    box = relative_boxes(torch.tensor([[area, ratio, along, down]], dtype=torch.float64))
    left, top, wide, high = box[0].tolist()
    assert left >= 0 and left + wide <= 1 + 1e-9 and top >= 0 and top + high <= 1 + 1e-9
    if wide < 1 and high < 1:
        assert wide * high == pytest.approx(area)
        assert wide / high == pytest.approx(ratio)
    covered = inside(box, size).double().mean().item()
    assert covered == pytest.approx(wide * high, abs=2 / size)


def test_crops_are_drawn_from_their_ranges():
    area, ratio, along, down = draw_crops(4001, CPU).T
    for found, low, high in ((area, 0.08, 1), (ratio, 3 / 4, 4 / 3), (along, 0, 1), (down, 0, 1)):
        assert low <= found.min() < low + 0.01 and high - 0.01 < found.max() <= high
    assert ratio.log().mean().abs() < 0.02


def test_a_crop_is_what_lies_in_the_box():
    places = torch.arange(32.0) * 8
    x = torch.stack([places.expand(32, 32), places[:, None].expand(32, 32)])
    x = torch.cat([x, x[:1]])[None]
    assert torch.allclose(crop(x, torch.tensor([[1.0, 1.0, 0.3, 0.3]])), x, atol=1e-3)
    found = crop(x, torch.tensor([[0.25, 1.0, 0.0, 1.0]]))[0]  # the lower left quarter
    middle = slice(3, -3)
    assert torch.allclose(found[0, 5, middle], (x[0, 0, 5] / 2 - 2)[middle], atol=0.5)
    assert torch.allclose(found[1, middle, 5], (x[0, 1, :, 5] / 2 + 126)[middle], atol=0.5)


def test_half_of_the_pictures_are_mirrored():
    x = random_pictures(997)
    mirrored = (flip(x) != x).any(3).any(2).any(1)
    assert torch.equal(flip(x[:0]), x[:0])
    assert 0.45 < mirrored.float().mean() < 0.55
    assert torch.equal(flip(x)[:1].sort(-1).values, x[:1].sort(-1).values)


# RandAugment


def pillow(name, image, level, sign):
    """The same operation by Pillow."""
    factor = max(0.1, 1 + sign * 0.9 * level)
    return {
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "posterize": lambda: ImageOps.posterize(image, 4 - int(level * 4)),
        "solarize": lambda: ImageOps.solarize(image, 256 - int(level * 256)),
        "solarize_add": lambda: image.point(
            [min(255, i + int(level * 110)) if i < 128 else i for i in range(256)] * 3
        ),
        "colour": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
    }[name]()


def as_image(x):
    return Image.fromarray(x.byte().permute(1, 2, 0).numpy())


@pytest.mark.parametrize("name", NAMES[:10])
@pytest.mark.parametrize("darkest", [0, 90])
def test_colours_change_as_pillow_changes_them(name, darkest):
    x = darkest + random_pictures(4, side=37) * (200 - darkest) // 255
    x[3] = 77.0  # one colour
    level, sign = torch.tensor([0.9, 0.45, 0.9, 0.77]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    found = apply(x, torch.full((4,), NAMES.index(name)), level, sign)
    for ours, picture, each, way in zip(found, x, level.tolist(), sign.tolist(), strict=True):
        theirs = np.asarray(pillow(name, as_image(picture), each, way)).astype(float)
        difference = ours.permute(1, 2, 0).numpy() - theirs
        exact = name in ("equalize", "invert", "posterize", "solarize")
        assert np.abs(difference).max() <= (0 if exact else 1.5)


@pytest.mark.parametrize("way", [1.0, -1.0])
@pytest.mark.parametrize("name", NAMES[10:])
def test_places_move_as_far_as_they_should(name, way):
    """In pictures whose values are places, from -1 to 1."""
    size = 41
    places = (torch.arange(size) + 0.5) * 2 / size - 1
    x, y = places.expand(size, size), places[:, None].expand(size, size)
    picture = 127.5 + 127.5 * torch.stack([x, y, x])[None]
    number, sign = torch.tensor([NAMES.index(name)]), torch.tensor([way])
    found = apply(picture, number, torch.ones(1), sign)[0] / 127.5 - 1
    turn = way * torch.tensor(torch.pi / 6)
    expected_x, expected_y = {
        "rotate": (turn.cos() * x - turn.sin() * y, turn.sin() * x + turn.cos() * y),
        "shear_x": (x + way * 0.3 * y, y),
        "shear_y": (x, y + way * 0.3 * x),
        "shift_x": (x + way * 2 * 0.45, y),
        "shift_y": (x, y + way * 2 * 0.45),
    }[name]
    within = (expected_x.abs() < 0.97) & (expected_y.abs() < 0.97)
    assert within.sum() > 500
    assert torch.allclose(found[0][within], expected_x[within], atol=1e-4)
    assert torch.allclose(found[1][within], expected_y[within], atol=1e-4)
    outside = (expected_x.abs() > 1.1) | (expected_y.abs() > 1.1)
    assert not outside.any() or found[0][outside].abs().max() < 1e-4  # the mean


def test_half_of_the_operations_are_left_undone_and_all_are_drawn():
    x = random_pictures(601, side=11)
    changed = (rand_augment(x, 9.0) != x).flatten(1).any(1)
    assert 0.4 < changed.float().mean() < 0.6
    x = x * 0.7
    alone = [apply(x[:1], torch.tensor([i]), torch.ones(1), torch.ones(1)) for i in range(15)]
    assert all(not torch.equal(each, x[:1]) for each in alone)
    assert torch.equal(apply(x, torch.full((601,), -1), torch.ones(601), torch.ones(601)), x)


# Mixing, erasing, and all of it


def test_smoothed_labels():
    found = smoothed(torch.tensor([2, 0]), 4, 0.1)
    assert found.tolist() == [
        pytest.approx([0.025, 0.025, 0.925, 0.025]),
        pytest.approx([0.925, 0.025, 0.025, 0.025]),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_targets_say_how_much_of_each_picture_is_there(seed):
    """Of pictures of one colour each, the mean colour is that of the target."""
    torch.manual_seed(seed)
    labels = torch.tensor([0, 1, 2, 3, 4, 1, 2])
    colours = torch.tensor([0.0, 50.0, 100.0, 200.0, 250.0])
    x = colours[labels][:, None, None, None].expand(7, 3, 16, 16)
    mixed = mix(x, smoothed(labels, 5, 0.0), 0.8, 1.0)
    assert torch.allclose(mixed.target.sum(-1), torch.ones(7))
    assert torch.allclose(mixed.x.mean((1, 2, 3)), mixed.target @ colours, atol=0.01)
    kept = mixed.target[0, 0].item()
    assert torch.allclose(mixed.target[3], smoothed(labels, 5, 0.0)[3])  # mixed with itself
    assert 0 <= kept <= 1


def test_pictures_are_blended_as_often_as_pasted():
    x = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 255.0)])
    target = torch.eye(2)
    pasted, kept = 0, []
    for seed in range(300):
        torch.manual_seed(seed)
        mixed = mix(x, target, 0.8, 1.0)
        pasted += bool(((mixed.x == 0) | (mixed.x == 255)).all())
        kept.append(mixed.target[0, 0].item())
    assert 0.4 < pasted / 300 < 0.65
    assert 0.45 < np.mean(kept) < 0.65  # boxes that are cut off keep more
    assert np.min(kept) < 0.1 and np.max(kept) > 0.9


def test_boxes_are_erased():
    x = random_pictures(401)
    assert torch.equal(erase(x, 0.0), x)
    changed = (erase(x, 1.0) != x).any(1).float().mean((1, 2))
    assert changed.min() > 0.005 and changed.max() < 0.4
    assert 0.18 < (erase(x, 0.25) != x).flatten(1).any(1).float().mean() < 0.32


@pytest.mark.parametrize("name", ["light", "deit"])
def test_augmentation_is_a_function_of_the_seed(name):
    x, labels = random_pictures(23), torch.arange(23) % 5
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(AUGMENTATIONS[name](x, labels, 5))
    first, again, other = results
    assert torch.equal(first.x, again.x) and torch.equal(first.target, again.target)
    assert not torch.equal(first.x, other.x)
    assert first.x.shape == x.shape and first.x.dtype == x.dtype
    assert first.x.min() >= -1e-3 and first.x.max() <= 255.001
    assert torch.allclose(first.target.sum(-1), torch.ones(23))
    if name == "light":
        assert torch.equal(first.target.argmax(-1), labels)
