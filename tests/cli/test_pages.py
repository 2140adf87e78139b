"""The commands of the pages, run one after the other in a folder, on small data and models."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from primal_attention.tasks import prepare_lra
from primal_attention.training import DOMAINS

from ..pages import ROOT, commands_in_blocks
from ..tasks.toy_pictures import write_pictures
from ..tasks.toy_rl import write_d4rl
from ..tasks.toy_text import write_text
from .command import primal, sets, told
from .test_lra import SIZES as PARTS
from .test_lra import write as write_arena
from .test_trained import TEST_FILE

SMALL = ["dim=8", "num_heads=2", "ffn_dim=13", "precision=fp32"]
SIZES = {  # of what each domain trains
    "uea": [*SMALL, "epochs=2"],
    "lra": [*SMALL, "batch_size=10", "steps=6", "eval_every=3", "attention.num_directions=3"],
    "language": [
        *(*SMALL, "num_layers=2", "num_tokens=17", "context_tokens=5", "batch_size=8"),
        *("steps=6", "eval_every=3", "attention.num_directions=3"),
    ],
    "rl": [
        *(*SMALL, "num_tokens=9", "batch_size=10", "steps=6", "eval_every=3"),
        "attention.num_directions=3",
    ],
    "images": [
        *("dim=9", "num_heads=3", "ffn_dim=13", "num_layers=2", "precision=fp32", "epochs=1"),
        *("image_size=16", "batch_size=8", "attention.num_directions=3"),
    ],
}
MORE = {  # options that keep a command short
    "rollout": ["--episodes", "2"],
    "sweep": ["--trials", "1"],
    "table": ["--folder", str(ROOT / "reproduction")],
}
ELSEWHERE = {  # what a test by itself runs, or nothing here can
    "--devices 2": "two processes: tests/training/test_processes.py",
    "PEMS-SF": "a set that is not at hand",
    "primal bench": "tests/cli/test_bench.py",
    "RUN OTHER_RUN": "three runs: tests/cli/test_report.py",
}


@pytest.fixture
def data(tmp_path):
    """Small sets under the names that the pages have, in the folder where a user stands."""
    write_text(tmp_path / "data/language/wikitext-2")
    write_arena(tmp_path / "data/lra", name="image")
    write_pictures(tmp_path / "data/images/tiny-imagenet-100")
    (tmp_path / "data/rl").mkdir(parents=True)
    write_d4rl(tmp_path / "data/rl/hopper-medium.hdf5")
    shutil.copy(TEST_FILE, tmp_path / "new.ts")
    (tmp_path / "data/uea/Heartbeat").mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        file = TEST_FILE.with_name(f"JapaneseVowels_{part}.ts")
        shutil.copy(file, tmp_path / f"data/uea/Heartbeat/Heartbeat_{part}.ts")


def words_of(command):
    """The words of a command, with what makes it small; a run is looked for under its name."""
    _, *words = shlex.split(command, comments=True)
    name, task, *_ = [*words, "", ""]
    words = [run_named(word) if word.startswith("runs/") else word for word in words]
    words += MORE.get(name, [])
    if name in ("train", "sweep"):
        words += [*sets(*SIZES[task.partition("/")[0]]), "--quiet", "--accelerator", "cpu"]
    return words


def run_named(path):
    """The run that a page calls seed0: with other settings its folder has a longer name."""
    found = sorted(Path(path).parent.glob(f"{Path(path).name}*"))
    return str(found[0]) if found else path


def is_run(command):
    return command.startswith("primal") and not any(words in command for words in ELSEWHERE)


def generate_few(name, folder, out):
    return prepare_lra(name, folder, out, sizes=PARTS, workers=1)


WALKS = ("cli", "images", "language", "lra", "offline_rl", "report")


@pytest.mark.parametrize("page", [f"docs/{name}" for name in WALKS])
def test_the_commands_of_a_page_run(page, data, monkeypatch):
    monkeypatch.delenv("PRIMAL_DATA")
    monkeypatch.setitem(DOMAINS, "lra", replace(DOMAINS["lra"], prepare=generate_few))
    commands = [each for each in commands_in_blocks(ROOT / f"{page}.md") if is_run(each)]
    if page == "docs/report":
        commands = [*commands_in_blocks(ROOT / "docs/cli.md")[:1], *commands]
    assert commands
    for command in commands:
        words = words_of(command)
        result = primal(*words)
        assert result.exit_code == 0, f"{command}: {told(result)}"


def test_what_is_left_out_is_on_the_pages():
    text = "\n".join(line for page in ROOT.glob("docs/*.md") for line in commands_in_blocks(page))
    assert all(re.search(re.escape(words), text) for words in ELSEWHERE)
