"""Read WAV files: PCM of 8, 16, 24 or 32 bits, any number of channels."""

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size, reading


def wav_length(path: Path) -> int:
    """Return the number of samples of each channel."""
    with _opened(path) as sound:
        return sound.getnframes()


def read_wav(path: Path, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
    """Read samples [n, channels] within -1 and 1, all of them or a part."""
    with _opened(path) as sound:
        count = (sound.getnframes() if end is None else end) - begin
        width, channels = sound.getsampwidth(), sound.getnchannels()
        sound.setpos(begin)
        content = sound.readframes(count)
        if len(content) != count * width * channels:
            raise ValueError(f"it has {len(content)} of {count * width * channels} bytes there")
    if width == 1:  # without a sign
        samples: NDArray[Any] = np.frombuffer(content, np.uint8).astype(np.float32) - 128
    elif width == 3:  # as the upper bytes of four
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        samples, width = wide.view("<i4"), 4
    else:
        samples = np.frombuffer(content, f"<i{width}")
    values = samples.astype(np.float32) / np.float32(2 ** (8 * width - 1))
    return values.reshape(-1, channels)


def wav_rate(path: Path) -> int:
    """Return the samples of a second."""
    with _opened(path) as sound:
        return sound.getframerate()


@contextmanager
def _opened(path: Path) -> Iterator[wave.Wave_read]:
    """Open a sound; errors name the file."""
    remedy = "get it anew, or convert it to PCM of 8, 16, 24 or 32 bits"
    size = file_size(path)
    with reading(path, "a whole WAV file", remedy), wave.open(str(path)) as sound:
        if not 1 <= sound.getsampwidth() <= 4 or sound.getframerate() < 1:
            raise ValueError(f"{8 * sound.getsampwidth()} bits, {sound.getframerate()} a second")
        if sound.getnframes() * sound.getnchannels() * sound.getsampwidth() > size:
            raise ValueError("it says that it has more samples than fit into it")
        yield sound
