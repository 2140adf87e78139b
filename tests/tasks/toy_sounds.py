"""Small folders of wav files."""

import wave

import numpy as np

RATE = 8000


def write_wav(path, samples, *, width=2, rate=RATE):
    """Write [n] or [n, channels] in [-1, 1] as PCM of that many bytes a sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.round(np.asarray(samples) * (2 ** (8 * width - 1) - 1)).astype("<i8")
    whole = (whole + 128 * (width == 1)).reshape(len(samples), -1)
    content = whole.reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((whole.shape[1], width, rate, 0, "NONE", ""))
        file.writeframes(content)


def tone(pitch, seconds=0.2, rate=RATE):
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)


def write_set(folder, names, count=4):
    """Low and high tones, of different lengths and loudness."""
    for i in range(count):
        for label, pitch in enumerate((300, 1500)):
            for name in names(label, i):
                gain = 0.1 + 0.8 * i / count
                write_wav(folder / name, gain * tone(pitch + 40 * i, 0.1 + 0.01 * i))


def own_folder(folder):
    write_set(folder / "tones", lambda c, i: [f"{g}/{'ab'[c]}/{i}.wav" for g in ("train", "test")])


def digits_folder(folder):
    write_set(
        folder / "digits" / "recordings",
        lambda c, i: [f"{c}_{who}_{n}.wav" for who in ("ann", "bo") for n in (i, 10 + i)],
    )


def esc50_folder(folder):
    write_set(folder / "esc50" / "audio", lambda c, i: [f"{f}-{i}-A-{c}.wav" for f in range(1, 6)])
