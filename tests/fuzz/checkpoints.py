"""Damage checkpoints, estimators and patched folders at random, and see whether reading notices.

    python tests/fuzz/checkpoints.py [--files 800] [--seed 0]

Bits are flipped, blocks zeroed or exchanged, ends cut off, headers changed. Each is to be refused
with a ValueError of one line that names it. Exits with 1 unless all are.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

BLOCK = 64  # bytes


class Subject(NamedTuple):
    """A file that is damaged, and how it is read."""

    path: Path
    read: Callable[[], Any]


def make_subjects(folder: Path) -> list[Subject]:
    """A run with both its checkpoints, an estimator, a patched folder."""
    from primal_attention.patching import load_patched, patch, save_patched
    from primal_attention.tasks import uea_task
    from primal_attention.timeseries import PrimalFormerClassifier
    from primal_attention.training import Recipe, launch, train_in
    from primal_attention.training.checkpoint import read_checkpoint
    from primal_attention.training.model_factory import load_trained

    run = folder / "run"
    sizes = {"dim": 8, "num_heads": 2, "ffn_dim": 8, "epochs": 1}
    recipe = Recipe("uea/JapaneseVowels", "linear", **sizes)
    task = uea_task("JapaneseVowels", valid=0.2, seed=0)
    train_in(run, recipe, task, launch(accelerator="cpu", devices=1))
    estimator = PrimalFormerClassifier(**sizes, num_layers=1, num_directions=3, random_state=0)
    numbers = np.random.default_rng(0)
    estimator.fit(numbers.normal(size=(12, 2, 5)), np.arange(12) % 2).save(folder / "estimator")
    plain = folder / "patched"
    save_patched(patch(encoder(), num_directions=3), plain)
    return [
        Subject(run / "best.safetensors", lambda: load_trained(run)),
        Subject(run / "last.safetensors", lambda: read_checkpoint(run / "last.safetensors")),
        Subject(folder / "estimator", lambda: PrimalFormerClassifier.load(folder / "estimator")),
        Subject(plain / "model.safetensors", lambda: load_patched(plain, encoder())),
        Subject(plain / "primal_attention.json", lambda: load_patched(plain, encoder())),
    ]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def flipped(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 3))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def zeroed(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    size = draw.randint(1, BLOCK)
    data[start : start + size] = bytes(len(data[start : start + size]))


def exchanged(data: bytearray, draw: random.Random) -> None:
    size = draw.randint(4, BLOCK)
    a, b = sorted(draw.randrange(len(data) - size) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def header(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(min(len(data), 600))] = draw.choice(b'\x00\xff09{}[],:"ax')


KINDS = (flipped, zeroed, exchanged, cut, header)


def damage(files: int, seed: int, folder: Path) -> Counter[str]:
    """How many files were refused well; each that was not is printed."""
    draw, counts = random.Random(seed), Counter[str]()
    subjects = make_subjects(folder)
    while counts.total() < files:
        subject, kind = draw.choice(subjects), draw.choice(KINDS)
        whole = subject.path.read_bytes()
        data = bytearray(whole)
        kind(data, draw)
        if data == whole:
            continue
        subject.path.write_bytes(data)
        told = verdict(subject)
        subject.path.write_bytes(whole)
        counts["refused" if told == "refused" else "wrong"] += 1
        if told != "refused":
            print(f"{subject.path.name}, {kind.__name__}: {told}")
    for subject in subjects:
        subject.read()  # whole again
    return counts


def verdict(subject: Subject) -> str:
    try:
        subject.read()
    except ValueError as error:
        text = str(error)
        named = str(subject.path) in text and "\n" not in text
        return "refused" if named else f"refused without its name, or on several lines: {error!r}"
    except Exception as error:
        return f"another error: {error!r}"
    return "read without a word"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = damage(options.files, options.seed, Path(folder))
    print(f"{counts['refused']} of {options.files} damaged files refused with one line")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
