"""Tiny files in the layouts that the data sets of the arena are handed out in."""

import numpy as np


def write_imdb(folder, films_by_part, *, unsup=False):
    """Reviews such as ``film reviewed in train neg 0``; films of {part: {label: [film, ...]}}."""
    for part, by_label in films_by_part.items():
        for label, films in by_label.items():
            place = folder / part / label
            place.mkdir(parents=True)
            urls = [f"http://www.imdb.com/title/{film}/usercomments" for film in films]
            (folder / part / f"urls_{label}.txt").write_text("\n".join(urls) + "\n")
            for number, film in enumerate(films):
                text = f"{film} reviewed in {part} {label} {number} é<br />"
                (place / f"{number}_{number % 10}.txt").write_text(text, encoding="utf-8")
    if unsup:
        (folder / "train" / "unsup").mkdir()
        (folder / "train" / "unsup" / "0_0.txt").write_text("no label")


def write_listops(folder, rows_by_part):
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in rows_by_part.items():
        lines = ["Source\tTarget", *(f"{source}\t{target}" for source, target in rows)]
        (folder / f"basic_{part}.tsv").write_text("\r\n".join(lines) + "\r\n")


def write_aan(folder, rows_by_part):
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in rows_by_part.items():
        lines = ["\t".join(map(str, row)) for row in rows]
        text = "\n".join(lines) + "\n"
        (folder / f"new_aan_pairs.{part}.tsv").write_text(text, encoding="utf-8")


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def colours(num=4):
    """Six batches of colour images, each with a black pixel, and their classes."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.integers(256, size=(num, 3072), dtype=np.uint8), rng.integers(10, size=num))
        for _ in BATCHES
    ]
    for data, _ in batches:
        data.reshape(num, 3, 1024)[:, :, 5] = 0
    return batches


def write_cifar_binary(folder, batches):
    folder.mkdir(parents=True)
    for name, (data, labels) in zip(BATCHES, batches, strict=True):
        rows = np.concatenate([labels[:, None].astype(np.uint8), data], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
