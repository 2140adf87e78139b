"""Pictures: crops, RandAugment, mixing and erasing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from primal_attention.tasks.images import (
    AUGMENTATIONS,
)
from primal_attention.tasks.images.augmentation import (
    NAMES,
    apply,
    crop,
    draw_crops,
    erase,
    flip,
    inside,
    mix,
    rand_augment,
    relative_boxes,
    smoothed,
)

CPU = torch.device("cpu")


def random_pictures(count, side=19, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, side, side), generator=generator).float()


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
