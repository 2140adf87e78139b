"""Streams of folders: every window once an epoch, in the same order, whoever reads it."""

import itertools
import wave

import numpy as np
import pytest
import torch

from primal_attention.tasks.streams import FolderStream, Share


@pytest.fixture
def texts(tmp_path):
    for number, length in enumerate((13, 3, 26, 8)):  # windows of 4: 3, 0, 6, 2
        (tmp_path / f"{number}").mkdir()
        letters = np.arange(length, dtype=np.uint8) + 50 * number
        (tmp_path / f"{number}" / "a.txt").write_bytes(letters.tobytes())
    return tmp_path


def first(stream, number):
    return [tuple(each.tolist()) for each in itertools.islice(stream, number)]


def test_an_epoch_has_every_window_once_in_an_order_of_its_own(texts):
    stream = FolderStream(texts, "text", 4)
    assert len(stream) == 11
    epochs = [first(stream, 11) for _ in range(2)]
    wanted = {
        tuple(range(50 * number + 4 * i, 50 * number + 4 * i + 4))
        for number, windows in ((0, 3), (2, 6), (3, 2))
        for i in range(windows)
    }
    assert set(epochs[0]) == set(epochs[1]) == wanted
    assert epochs[0] != epochs[1]
    assert first(FolderStream(texts, "text", 4), 22) == epochs[0] + epochs[1]
    assert first(FolderStream(texts, "text", 4, seed=1), 11) != epochs[0]


def test_processes_share_windows_and_go_on_in_other_numbers(texts):
    whole = first(FolderStream(texts, "text", 4), 30)
    shares = [FolderStream(texts, "text", 4, cases=Share(index, 3)) for index in range(3)]
    read = zip(*(first(stream, 5) for stream in shares), strict=True)
    assert [window for step in read for window in step] == whole[:15]
    assert {stream.state_dict()["position"] for stream in shares} == {15}
    alone = FolderStream(texts, "text", 4)
    alone.load_state_dict(shares[0].state_dict())
    assert first(alone, 15) == whole[15:]


def test_processes_share_the_tokens_of_a_window(texts):
    whole = first(FolderStream(texts, "text", 4, following=1), 9)
    for window, *parts in zip(
        whole,
        *(
            first(FolderStream(texts, "text", 4, tokens=Share(i, 3), following=1), 9)
            for i in range(3)
        ),
        strict=True,
    ):
        assert [token for part in parts for token in part[:-1]] == list(window[:-1])
        assert parts[-1][-1] == window[-1]


@pytest.mark.parametrize(("width", "kind"), [(1, np.uint8), (2, "<i2"), (4, "<i4")])
def test_sound_is_between_minus_one_and_one(tmp_path, width, kind):
    levels = np.array([[-1.0, 0.5], [0.0, -0.5], [0.25, 0.75]])
    samples = levels * 2.0 ** (8 * width - 1) + (128 if width == 1 else 0)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(samples.astype(kind).tobytes())
    (window,) = itertools.islice(FolderStream(tmp_path, "audio", 3), 1)
    torch.testing.assert_close(window, torch.from_numpy(levels).float())
    (part,) = itertools.islice(FolderStream(tmp_path, "audio", 3, tokens=Share(1, 2)), 1)
    torch.testing.assert_close(part, window[1:])


def test_errors_name_the_remedy(texts):
    with pytest.raises(ValueError, match="kind must be one of text, audio, got 'video'"):
        FolderStream(texts, "video", 4)
    with pytest.raises(ValueError, match="at least the 3 shares of a window, got 2"):
        FolderStream(texts, "text", 2, tokens=Share(0, 3))
    with pytest.raises(ValueError, match=r"no \*.txt of 99 tokens; put longer files"):
        FolderStream(texts, "text", 99)
    (texts / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"a.wav is not a whole WAV file .* convert it"):
        FolderStream(texts, "audio", 4)
