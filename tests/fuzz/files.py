"""Read mutated files, and count the ends that should not be.

    python tests/fuzz/files.py --cases 3000 --seed 0      # by hand, 5 minutes

Each case takes the whole files of a reader, damages one of them and reads them in a process of its
own, within 4 GiB and 5 seconds of a processor. It may end well, for not all damage can be seen, or
with an error that names the file in one line. All else is counted, and the exit code is 1. Readers
of other files are added to ``READERS``.
"""

from __future__ import annotations

import argparse
import collections
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from tasks.lra import toy_files  # noqa: E402
from tasks.toy_pictures import write_pictures  # noqa: E402
from tasks.toy_rl import trajectories  # noqa: E402
from tasks.toy_series import make_series  # noqa: E402
from tasks.toy_sounds import own_folder  # noqa: E402
from tasks.toy_text import write_text  # noqa: E402

from primal_attention.cli.predict import read_series  # noqa: E402
from primal_attention.tasks import (  # noqa: E402
    images_task,
    language_task,
    lra_task,
    prepare_language,
    rl_task,
    uea_task,
)
from primal_attention.tasks.audio import SOUNDS, audio_task  # noqa: E402
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask  # noqa: E402
from primal_attention.tasks.lra.texts import read_retrieval_imdb  # noqa: E402
from primal_attention.tasks.offline_rl import RL  # noqa: E402
from primal_attention.tasks.streams import FolderStream  # noqa: E402
from primal_attention.training import Recipe  # noqa: E402
from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint  # noqa: E402
from primal_attention.training.outcome import Outcome  # noqa: E402
from primal_attention.training.results import add_rows, read_rows, row_of  # noqa: E402
from primal_attention.training.run_directory import read_outcome, read_recipe  # noqa: E402

SPACE, SECONDS, EXTRA = 4 << 30, 5, 1 << 30
PATIENCE = 60.0  # seconds by the clock, for what waits; other programs may be running
BOMB = 768 << 20  # bytes of an array that takes less than a MB in its file


class Reader(NamedTuple):
    """Files, and what reads them."""

    make: Callable[[Path], object]  # writes whole files into a folder
    read: Callable[[Path], object]  # reads them
    damaged: str = "*"  # which of them are mutated, as ``Path.rglob`` has it
    together: bool = False  # files that may be wrong only together; their folder is named then


# The readers


def _ts_text(seed: int, label: str = "true a b") -> str:
    cases = make_series((7, 5, 11, 6), seed=seed)
    rows = [":".join(",".join(f"{v:.4g}" for v in row) for row in case) for case in cases]
    ends = ["" if label == "false" else f":{'ab'[i % 2]}" for i in range(len(rows))]
    head = f"# é\n@problemName Toy\n@timeStamps false\n@dimensions 3\n@classLabel {label}\n@data\n"
    return head + "".join(f"{row}{end}\n" for row, end in zip(rows, ends, strict=True))


def _ts(folder: Path) -> None:
    for seed, part in enumerate(("TRAIN", "TEST")):
        (folder / f"Toy_{part}.ts").write_text(_ts_text(seed), encoding="utf-8")


def _lra(name: str, *, pairs: bool, symbols: int, classes: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        rng = np.random.default_rng(0)
        tokens = rng.integers(symbols, size=(20, 64), dtype=np.uint8)
        targets = rng.integers(classes, size=20, dtype=np.uint8)
        both = rng.integers(20, size=(20, 2), dtype=np.int32) if pairs else None
        prepared = PreparedTask(name, PartSizes(12, 4, 4), tokens, targets, both)
        LRA.write(folder / f"{name}.npz", prepared)

    return make


def _listops(folder: Path) -> None:
    rows = [("( ( ( [MAX 2 ) 9 ) ] )", 9), ("7", 7), ("( ( [SM 1 ) 4 ) ]", 5)] * 3
    toy_files.write_listops(folder, dict.fromkeys(("train", "val", "test"), rows))


def _aan(folder: Path) -> None:
    rows = [("1.0", "a", "b", "text of a", "é"), ("0.0", "a", "c", "text of a", "c" * 50)] * 3
    toy_files.write_aan(folder, dict.fromkeys(("train", "eval", "test"), rows))


def _imdb(folder: Path) -> None:
    films = {label: [f"tt{label}{i // 2}" for i in range(24)] for label in ("neg", "pos")}
    others = {label: [f"tt{label}{i // 2}x" for i in range(24)] for label in ("neg", "pos")}
    toy_files.write_imdb(folder, {"train": films, "test": others})


def _pairs_of_films(folder: Path) -> object:
    return read_retrieval_imdb(folder, sizes=PartSizes(8, 4, 8))


def _cifar_grey(folder: Path) -> None:
    x, y = np.zeros((20, 32, 32), np.uint8), np.arange(20) % 10
    np.savez(folder / "cifar10_grey.npz", x_train=x, y_train=y, x_test=x, y_test=y)


def _tiny_imagenet(folder: Path) -> None:
    classes = ("birds", "cats", "dogs")
    write_pictures(folder / "toy", counts=(3, 2), suffix="jpeg")
    place, lines = folder / "toy" / "val" / "images", []
    place.mkdir()
    for name in classes:
        for path in sorted((folder / "toy" / "val" / name).iterdir()):
            lines.append(f"{name}{path.name}\t{name}\t0\t0\t9\t9\n")
            path.rename(place / f"{name}{path.name}")
    (folder / "toy" / "val" / "val_annotations.txt").write_text("".join(lines))


def _read_pictures(folder: Path) -> object:
    return images_task("toy", folder=folder, image_size=16, patch_size=8, valid="test")


def _prepared_text(folder: Path) -> None:
    write_text(folder / "wikitext-2")
    prepare_language("wikitext-2", folder)
    shutil.rmtree(folder / "wikitext-2")


def _d4rl(folder: Path, *, compressed: bool = False) -> None:
    found = trajectories()
    ends = np.zeros(len(found.rewards), bool)
    ends[np.cumsum(found.lengths) - 1] = True
    arrays = {"observations": found.states, "actions": found.actions, "rewards": found.rewards}
    options = {"compression": "gzip", "fletcher32": True} if compressed else {}
    with h5py.File(folder / "hopper-medium.hdf5", "w") as file:
        for name, values in {**arrays, "terminals": ends, "timeouts": ~ends & False}.items():
            file.create_dataset(name, data=values, **options)


def _read_rl(folder: Path) -> object:
    return rl_task("hopper-medium", folder=folder, seed=0)


def _wav(folder: Path) -> None:
    with wave.open(str(folder / "new.wav"), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(256)) * 8)


def _prepared_sounds(folder: Path) -> None:
    own_folder(folder)
    SOUNDS.prepare("tones", folder)
    shutil.rmtree(folder / "tones")


def _read_sounds(folder: Path) -> object:
    return audio_task("tones", folder=folder, num_samples=1000, valid=0.25, seed=0)


def _run_of(recipe: Recipe) -> Outcome:
    entry = {"epoch": 1, "step": 3, "train_loss": 0.5, "objective": 0.0}
    entry |= {"valid_loss": 0.4, "valid_accuracy": 80.0}
    weights = {"proj.weight": torch.linspace(0, 1, 35).view(5, 7)}
    return Outcome(recipe, "accuracy", 75.0, 80.0, [entry], 0, 3, 1.5, "cpu", weights)


def _run(folder: Path) -> None:
    """A run that is over, with its weights, and its row in a table."""
    recipe = Recipe("uea/JapaneseVowels", "linear", dim=8, num_heads=2)
    outcome = _run_of(recipe)
    (folder / "recipe.json").write_text(recipe.to_json(), encoding="utf-8")
    values = {
        key: value for key, value in vars(outcome).items() if key not in ("recipe", "weights")
    }
    values |= {"recipe": json.loads(recipe.to_json())}
    (folder / "result.json").write_text(json.dumps(values), encoding="utf-8")
    write_checkpoint(folder / "best.safetensors", outcome.weights, {"recipe": recipe.to_json()})
    add_rows(folder / "results.csv", [row_of(outcome, "0123abcd")])


READERS: dict[str, Reader] = {
    "run, recipe": Reader(_run, read_recipe, "recipe.json"),
    "run, result": Reader(_run, read_outcome, "result.json"),
    "run, weights": Reader(
        _run, lambda folder: read_checkpoint(folder / "best.safetensors"), "best.safetensors"
    ),
    "run, rows": Reader(_run, lambda folder: read_rows(folder / "results.csv"), "results.csv"),
    "series, .ts": Reader(_ts, lambda folder: uea_task("Toy", folder=folder, valid="test", seed=0)),
    "series to predict, .ts": Reader(
        lambda folder: (folder / "new.ts").write_text(_ts_text(0, "false"), encoding="utf-8"),
        lambda folder: read_series(folder / "new.ts"),
    ),
    "series to predict, .npy": Reader(
        lambda folder: np.save(folder / "new.npy", np.stack(make_series((7, 7)))),
        lambda folder: read_series(folder / "new.npy"),
    ),
    "sound, .wav": Reader(_wav, lambda folder: next(iter(FolderStream(folder, "audio", 99)))),
    "listops, prepared": Reader(
        _lra("listops", pairs=False, symbols=16, classes=10),
        lambda folder: lra_task("listops", folder=folder),
    ),
    "retrieval, prepared": Reader(
        _lra("retrieval", pairs=True, symbols=256, classes=2),
        lambda folder: lra_task("retrieval", folder=folder),
    ),
    "listops, .tsv": Reader(_listops, lambda folder: lra_task("listops", folder=folder)),
    "retrieval, .tsv": Reader(_aan, lambda folder: lra_task("retrieval", folder=folder)),
    "imdb, reviews": Reader(_imdb, lambda folder: lra_task("text", folder=folder), "*_*.txt"),
    "imdb, films": Reader(_imdb, _pairs_of_films, "urls_*.txt", together=True),
    "cifar, binary": Reader(
        lambda folder: toy_files.write_cifar_binary(
            folder / "cifar-10-batches-bin", toy_files.colours(4)
        ),
        lambda folder: lra_task("image", folder=folder),
    ),
    "cifar, grey": Reader(_cifar_grey, lambda folder: lra_task("image", folder=folder)),
    "text": Reader(
        lambda folder: write_text(folder / "wikitext-2"),
        lambda folder: language_task("wikitext-2", folder=folder, num_tokens=16),
    ),
    "text, reviews": Reader(
        _imdb, lambda folder: language_task("imdb", folder=folder, num_tokens=16), "*_*.txt"
    ),
    "text, prepared": Reader(
        _prepared_text, lambda folder: language_task("wikitext-2", folder=folder, num_tokens=16)
    ),
    **{
        f"pictures, .{suffix}": Reader(
            lambda folder, suffix=suffix: write_pictures(folder / "toy", (3, 2), suffix=suffix),
            _read_pictures,
        )
        for suffix in ("png", "jpeg", "webp")
    },
    "pictures, lists": Reader(_tiny_imagenet, _read_pictures, "*.txt"),
    "sounds, .wav": Reader(own_folder, _read_sounds, "*.wav"),
    "sounds, prepared": Reader(_prepared_sounds, _read_sounds),
    "trajectories, prepared": Reader(
        lambda folder: RL.write(folder / "hopper-medium.npz", trajectories()), _read_rl
    ),
    "trajectories, D4RL": Reader(_d4rl, _read_rl),
    "trajectories, compressed": Reader(lambda folder: _d4rl(folder, compressed=True), _read_rl),
}


# The damage


def flipped(content: bytearray, rng: random.Random) -> bytes:
    """Change some bits."""
    for _ in range(rng.choice([1, 1, 8, 64])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def cut(content: bytearray, rng: random.Random) -> bytes:
    """Leave out the end."""
    return bytes(content[: rng.randrange(len(content))])


def zeroed(content: bytearray, rng: random.Random) -> bytes:
    """Fill a block with zeros."""
    start, size = rng.randrange(len(content)), rng.choice([4, 64, 512])
    content[start : start + size] = bytes(len(content[start : start + size]))
    return bytes(content)


def exchanged(content: bytearray, rng: random.Random) -> bytes:
    """Let two blocks change places."""
    size = rng.randint(1, max(1, len(content) // 4))
    a, b = (rng.randrange(max(1, len(content) - size)) for _ in range(2))
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    return bytes(content)


def doubled(content: bytearray, rng: random.Random) -> bytes:
    """Repeat a block."""
    start = rng.randrange(len(content))
    size = rng.randint(1, len(content))
    return bytes(content[:start] + content[start : start + size] + content[start:])


def edited(content: bytearray, rng: random.Random) -> bytes:
    """Write sizes that are too large at the beginning or the end, where headers are."""
    start = rng.randrange(min(len(content), 256))
    start = start if rng.random() < 0.5 else len(content) - 1 - start
    new = rng.choice([b"\xff" * 4, b"\xff" * 8, b"\x00" * 4, b"\x7f", b"\xff\xff\xff\x7f"])
    content[start : start + len(new)] = new
    return bytes(content)


NUMBERS = (b"100000000000000", b"-1", b"0", b"9" * 30, b"1e400", b"nan", b"4294967296", b"")


def renumbered(content: bytearray, rng: random.Random) -> bytes:
    """Write another number for one that is there in digits."""
    found = list(re.finditer(rb"\d+", content))
    if not found:
        return edited(content, rng)
    start, end = rng.choice(found).span()
    return bytes(content[:start] + rng.choice(NUMBERS) + content[end:])


RAW = (flipped, cut, zeroed, exchanged, doubled, edited, renumbered)


def damaged_inside(content: bytearray, rng: random.Random) -> bytes:
    """Damage an array of an .npz and pack it anew, so that its checksums are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {each: archive.read(each) for each in archive.namelist()}
    except zipfile.BadZipFile:
        return rng.choice(RAW)(content, rng)
    name = rng.choice(sorted(members))
    bomb = b""
    match rng.randrange(9):
        case 0:
            members[rng.choice(["../x.npy", "/x.npy", "x", "a/b.npy"])] = members.pop(name)
        case 1:
            members[name] = members[rng.choice(sorted(members))]
        case 2:
            del members[name]
        case 3:
            del members[name]
            bomb = _header(BOMB)
        case _:
            damage = renumbered if rng.random() < 0.5 else rng.choice(RAW)
            members[name] = damage(bytearray(members[name]), rng)
    packed = io.BytesIO()
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(packed, "w", method) as archive:
        for each, value in members.items():
            archive.writestr(each, value)
        if bomb:
            archive.compression, archive.compresslevel = zipfile.ZIP_DEFLATED, 1
            with archive.open(name, "w") as file:
                file.write(bomb)
                for _ in range(BOMB >> 20):
                    file.write(bytes(2**20))
    return packed.getvalue()


def _header(size: int) -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def foreign_files() -> list[bytes]:
    """Files of other kinds, and some that unpack to far more than they take."""
    hole = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(hole, "PNG")
    picture = io.BytesIO()
    Image.new("RGB", (13, 7)).save(picture, "GIF")
    objects = io.BytesIO()
    np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return [
        b"",
        b"\0" * 4096,
        b"PK",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n",
        b"\x7fELF\x02\x01\x01" + bytes(999),
        b"\xff\xfe" + "text of another sort\n".encode("utf-16-le") * 50,
        b"<html><head><title>404</title></head></html>\n",
        b'{"a": ' * 50_000,
        zlib.compress(b"a" * 10_000),
        hole.getvalue(),
        picture.getvalue(),
        _header(10**14),
        objects.getvalue(),
        b"\x89HDF\r\n\x1a\n" + bytes(200),
    ]


def mutated(content: bytes, foreign: list[bytes], rng: random.Random) -> tuple[str, bytes]:
    """The content with some damage, and the name of it."""
    if not content or rng.random() < 0.08:
        return "foreign", rng.choice(foreign)
    damage = damaged_inside if rng.random() < 0.35 else rng.choice(RAW)
    return damage.__name__, damage(bytearray(content), rng)


# The cases


class End(NamedTuple):
    """How a case ended."""

    verdict: str  # "read" and "refused" are right
    message: str
    seconds: float
    extra: int  # bytes


def _space_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _read(reader: Reader, folder: Path, answer: int) -> None:
    """Read in a process that has been forked for it, and say how it went."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    limit = _space_in_use() + SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    told = {"error": "", "message": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(folder)
    except BaseException as error:
        told = {"error": type(error).__name__, "message": str(error)}
        told["usual"] = "yes" if isinstance(error, (ValueError, OSError)) else ""
    os.write(answer, json.dumps(told).encode()[:60_000])


def run(reader: Reader, folder: Path, damaged: Path) -> End:
    """Read the files of a folder within the limits, one of them damaged."""
    ours, theirs = os.pipe()
    start = time.monotonic()
    if (child := os.fork()) == 0:
        os.close(ours)
        try:
            _read(reader, folder, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done or time.monotonic() - start > PATIENCE:
            break
        time.sleep(0.002)
    if not done:
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    with os.fdopen(ours, "rb") as pipe:
        answer = pipe.read()
    seconds, extra = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 - _idle()
    in_time = bool(done) and seconds < SECONDS
    named = folder if reader.together else damaged
    return _judged(named, answer, status, seconds, extra, in_time=in_time)


@functools.cache
def _idle() -> int:
    """The bytes that a forked process takes that does nothing."""
    if (child := os.fork()) == 0:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss * 1024


def _judged(
    named: Path, answer: bytes, status: int, seconds: float, extra: int, *, in_time: bool
) -> End:
    told = json.loads(answer) if answer else {"error": f"status {status}", "message": ""}
    message = f"{told['error']}: {told['message']}"
    if not in_time:
        verdict = "too long"
    elif not answer:
        verdict = "crashed"
    elif extra > EXTRA:
        verdict = "too large"
    elif not told["error"]:
        verdict = "read"
    elif not told["usual"] or str(named) not in message or "\n" in message:
        verdict = "unnamed"
    else:
        verdict = "refused"
    return End(verdict, message, seconds, extra)


def cases(names: list[str], number: int, seed: int, place: Path) -> Iterator[tuple[str, str, End]]:
    """Damage and read, one reader after the other."""
    foreign = foreign_files()
    for name in names:
        whole = place / "whole" / str(names.index(name))
        whole.mkdir(parents=True)
        READERS[name].make(whole)
        if (end := run(READERS[name], whole, whole)).verdict != "read":
            raise SystemExit(f"{name}: whole files are not read: {end}")
    for index in range(number):
        name, rng = names[index % len(names)], random.Random(f"{seed} {index}")
        reader, folder = READERS[name], place / f"case{index}"
        shutil.copytree(place / "whole" / str(names.index(name)), folder)
        found = sorted(each for each in folder.rglob(reader.damaged) if each.is_file())
        path = rng.choice(found)
        damage, content = mutated(path.read_bytes(), foreign, rng)
        path.write_bytes(content)
        yield name, f"case {index}, {damage} {path.name}", run(reader, folder, path)
        shutil.rmtree(folder)


def main() -> int:
    """Run cases, say what ended wrongly, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", nargs="*", choices=list(READERS), metavar="NAME")
    parser.add_argument("--messages", action="store_true", help="print what is said of each case")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    longest, largest = 0.0, 0
    names = options.reader or list(READERS)
    with tempfile.TemporaryDirectory() as place:
        for name, case, end in cases(names, options.cases, options.seed, Path(place)):
            counts[name][end.verdict] += 1
            longest, largest = max(longest, end.seconds), max(largest, end.extra)
            if options.messages or end.verdict not in ("read", "refused"):
                print(f"{name}, {case}: {end.verdict}, {end.message[:400]}", flush=True)
    total = sum(counts.values(), collections.Counter[str]())
    for name, count in counts.items():
        print(f"{name:26}{dict(sorted(count.items()))}")
    print(f"all: {dict(total)}; longest {longest:.2f} s, largest {largest >> 20} MiB more")
    return int(total["read"] + total["refused"] != options.cases)


if __name__ == "__main__":
    raise SystemExit(main())
