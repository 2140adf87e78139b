"""Train toys whose cases are shared out token by token."""

import logging
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
from toy import toy_recipe, toy_task

from primal_attention.tasks.language.task import PERPLEXITY, text_windows
from primal_attention.tasks.task import Sizes, Task
from primal_attention.training import launch, train_in
from primal_attention.training.context import context_mesh

OPTIONS = {"dropout": 0.0, "clip_norm": 0.2, "eta": 0.5, "epochs": 2}
RECIPES = {
    "toy": toy_recipe(**OPTIONS),
    "words": toy_recipe(**OPTIONS, valid_fraction=0).replace(
        task="language/toy", attention={"num_directions": 3, "weights": "dual", "rotary": True}
    ),
}


def words_task():
    """Windows of nine words: their shards have different lengths."""
    text = torch.randint(1, 7, (99,), generator=torch.Generator().manual_seed(0)).numpy()
    cases = [text_windows(text[a:b], 9) for a, b in ((0, 60), (60, 80), (80, 99))]
    return Task("language/toy", PERPLEXITY, Sizes(9, 7, vocab_size=7), *cases)


TASKS = {"toy": toy_task, "words": words_task}


def train_all(folder, fabric, mesh=None):
    for name, recipe in RECIPES.items():
        train_in(folder / name, recipe, TASKS[name](), fabric, context=mesh)


def main(mesh, folder, strategy):
    rank, size = str(mesh.get_rank()), str(mesh.size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {**names, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    fabric = launch(accelerator="cpu", devices=mesh.size(), strategy=strategy)
    train_all(folder, fabric, context_mesh(fabric, 2))
