"""Sets of sounds: clips of 8,000 samples a second in 8-bit mu-law codes.

The Free Spoken Digit Dataset and ESC-50 (Piczak, 2015) are read as they are handed out, any other
set from ``<set>/<group>/<class>/*.wav``, where the group ``test`` is the official test part.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import ArrayFile, open_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.prepared import PreparedSets, data_folders
from primal_attention.tasks.wav_files import read_wav, wav_rate

RATE = 8000  # samples a second
_SLOWEST = 1000  # samples a second of a file; others would need memory without bound
SILENCE = 128  # the code of zero
_SOURCES = {"digits": ("fsdd_8k.npz", "recordings"), "esc50": ("esc50_8k.npz", "audio")}
_OFFICIAL = 5  # of the fifty recordings of a digit by a speaker, the first so many are for tests


@dataclass(frozen=True, eq=False)
class Sounds:
    """Clips, one after the other, with the class and the group of each.

    A group, such as a speaker or a fold, can be held out as the test part.
    """

    codes: NDArray[np.uint8]
    lengths: NDArray[np.int64]  # [B]
    labels: NDArray[np.int64]  # [B]
    groups: NDArray[np.str_]  # [B]
    is_test: NDArray[np.bool_]  # [B], the official test part
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that the arrays fit each other."""
        count = len(self.lengths)
        arrays = (self.lengths, self.labels, self.groups, self.is_test)
        if not count or any(each.shape != (count,) for each in arrays):
            raise ValueError(f"shapes of its arrays are {[each.shape for each in arrays]}")
        if self.lengths.min() < 1 or self.codes.shape != (self.lengths.sum(),):
            raise ValueError(f"lengths of {self.lengths.sum()} for codes {self.codes.shape}")
        if self.codes.dtype != np.uint8:
            raise ValueError(f"its codes are {self.codes.dtype}, not uint8")
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise ValueError(f"labels up to {self.labels.max()} for {len(self.classes)} classes")


def encode(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """Encode samples in [-1, 1] by mu-law, with mu = 255."""
    y = np.sign(samples) * np.log1p(255 * np.abs(samples).clip(max=1)) / np.log(256)
    codes: NDArray[np.uint8] = np.floor(127.5 * y + 128).clip(0, 255).astype(np.uint8)
    return codes


def _read_clip(path: Path) -> NDArray[np.uint8]:
    """Read the mean of the channels of a WAV file, resampled by the sums of its Fourier series."""
    samples, rate = read_wav(path).mean(1, dtype=np.float64), wav_rate(path)
    if not len(samples) or rate < _SLOWEST:
        what = f"{len(samples)} samples, {rate} a second"
        raise ValueError(f"{path} has {what}; remove it, or get it anew")
    if rate != RATE:
        count = max(1, round(len(samples) * RATE / rate))
        samples = np.fft.irfft(np.fft.rfft(samples), count) * (count / len(samples))
    return encode(samples)


class SoundSets(PreparedSets[Sounds]):
    """The sets of sounds, prepared as ``<name>.npz``."""

    domain, format = "audio", "primal-attention sounds, version 1"
    names, noun, compressed = tuple(_SOURCES), "set of sounds", True

    def _check_name(self, name: str) -> None:
        """Any folder with wav files is a set."""

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        for place in data_folders(self.domain, folder):
            file, clips = _SOURCES.get(name, ("", ""))
            if file and (place / file).is_file():
                return place / file
            if clips and (place / name / clips).is_dir():
                return place / name / clips
            if next((place / name).glob("*/*/*.wav"), None) is not None:
                return place / name
        return None

    def _read_files(self, name: str, place: Path) -> Sounds:
        if place.is_file():
            with (
                reading(place, "a whole set of sounds", "get it anew"),
                open_arrays(place) as arrays,
            ):
                return _compact(arrays)
        kind = {"digits": _digit, "esc50": _environment}.get(name, _of_folder)
        pattern = "*/*/*.wav" if kind is _of_folder else "*.wav"
        clips = [(path, *kind(path)) for path in sorted(place.glob(pattern))]
        codes = [_read_clip(path) for path, *_ in clips]
        names = sorted({label for _, label, *_ in clips})
        return Sounds(
            np.concatenate(codes),
            np.array([len(each) for each in codes]),
            np.searchsorted(names, [label for _, label, *_ in clips]),
            np.array([group for *_, group, _ in clips]),
            np.array([is_test for *_, is_test in clips]),
            tuple(names),
        )

    def _pack(self, found: Sounds) -> dict[str, Any]:
        arrays = {name: getattr(found, name) for name in _ARRAYS}
        classes = np.array(json.dumps(found.classes))
        return {"format": np.array(self.format), "classes": classes, **arrays}

    def _unpack(self, arrays: ArrayFile, name: str) -> Sounds:
        classes = tuple(map(str, json.loads(arrays.text("classes"))))
        return Sounds(**{each: arrays[each] for each in _ARRAYS}, classes=classes)

    def _advice(self, name: str, folder: Path | None) -> str:
        place = data_folders(self.domain, folder)[0]
        clips = _SOURCES[name][1] if name in _SOURCES else "<group>/<class>"
        return f"{name}: no sounds. Put wav files into {place / name / clips}"


_ARRAYS = ("codes", "lengths", "labels", "groups", "is_test")


def _digit(path: Path) -> tuple[str, str, bool]:
    """Split names such as 7_george_31.wav."""
    with reading(path, "a spoken digit", "its name is digit_speaker_number.wav"):
        digit, speaker, number = path.stem.split("_")
        return digit, speaker, int(number) < _OFFICIAL


def _environment(path: Path) -> tuple[str, str, bool]:
    """Split names such as 1-100032-A-0.wav: fold, recording, take and class."""
    with reading(path, "a clip of ESC-50", "its name is fold-recording-take-class.wav"):
        fold, _, _, label = path.stem.split("-")
        return f"{int(label):02d}", f"fold{fold}", False


def _of_folder(path: Path) -> tuple[str, str, bool]:
    group = path.parts[-3]
    return path.parent.name, group, group == "test"


def _compact(arrays: ArrayFile) -> Sounds:
    """Read a compact copy of spoken digits or of ESC-50."""
    codes, labels = arrays["x"], arrays["y"].astype(np.int64)
    if "fold" in arrays:
        groups = np.array([f"fold{each}" for each in arrays["fold"].tolist()])
        lengths, is_test = np.full(len(codes), codes.shape[1]), np.zeros(len(codes), bool)
        return Sounds(
            codes.reshape(-1), lengths, labels, groups, is_test, tuple(arrays["classes"].tolist())
        )
    groups, is_test = arrays["speakers"][arrays["speaker"]], arrays["index"] < _OFFICIAL
    digits = tuple(map(str, range(10)))
    return Sounds(codes, arrays["length"].astype(np.int64), labels, groups, is_test, digits)


SOUNDS = SoundSets()
