"""What someone who looks on sees."""

import io
import sys

import pytest
from rich.console import Console

from primal_attention.training import progress_bar, train, train_in
from primal_attention.training.watchers import Lines

from .toy import Interrupted, one_process, toy_recipe, toy_task

FABRIC = one_process()
TASK = toy_task()


def shown(directory, *, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    watcher = progress_bar(console)
    train_in(directory, toy_recipe(), TASK, FABRIC, watcher=watcher)
    return console.file.getvalue()


def test_a_bar_in_a_terminal(tmp_path):
    text = shown(tmp_path, terminal=True)
    last = [line for line in text.splitlines() if "epoch" in line][-1]
    for part in ("epoch 5/5", "loss ", "accuracy ", "best ", "left"):
        assert part in last
    assert "━" in last


def test_a_line_now_and_then_elsewhere(tmp_path):
    lines = shown(tmp_path, terminal=False).splitlines()
    assert lines[0] == "toy/toy, primalformer, 20 steps"
    assert lines[1].startswith("epoch 1/5, loss ")
    assert lines[-1].startswith("epoch 5/5, loss ")
    assert lines[-1].endswith(", 0:00 left")
    assert len(lines) == 3  # the rounds between came too soon


def test_every_round_when_they_take_long():
    console = Console(file=io.StringIO())
    train(toy_recipe(), TASK, FABRIC, watcher=Lines(console, every=0))
    epochs = [line.split(",")[0] for line in console.file.getvalue().splitlines()[1:]]
    assert epochs == [f"epoch {epoch}/5" for epoch in range(1, 6)]


def test_a_resumed_run_says_so(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path, toy_recipe(), TASK, FABRIC, watcher=Interrupted(4), save_every=0)
    lines = shown(tmp_path, terminal=False).splitlines()
    assert lines[0].endswith("20 steps after epoch 3")
    assert lines[1].startswith("epoch 4/5")


def test_without_rich_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'primal-attention\[cli\]'"):
        progress_bar()
