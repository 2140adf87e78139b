"""Train toys with sharded sequences: toys.py FOLDER PROCESSES CONTEXT STRATEGY."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
from toy import toy_recipe, toy_task

from primal_attention.tasks.language.task import PERPLEXITY, text_windows
from primal_attention.tasks.task import Sizes, Task
from primal_attention.training import finish, launch, train_in
from primal_attention.training.context import context_mesh

OPTIONS = {"dropout": 0.0, "clip_norm": 0.2, "eta": 0.5, "epochs": 2, "refit": False}
RECIPES = {
    "toy": toy_recipe(**OPTIONS),
    "words": toy_recipe(**OPTIONS, valid_fraction=0).replace(
        task="language/toy", attention={"num_directions": 3, "weights": "dual", "rotary": True}
    ),
}


def words_task():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 7, (99,), generator=generator).numpy()
    cases = [text_windows(text[a:b], 9) for a, b in ((0, 60), (60, 80), (80, 99))]
    return Task("language/toy", PERPLEXITY, Sizes(9, 7, vocab_size=7), *cases)


TASKS = {"toy": toy_task, "words": words_task}


def main(folder, processes, context, strategy):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fabric = launch(accelerator="cpu", devices=int(processes), strategy=strategy)
    mesh = context_mesh(fabric, int(context))
    for name, recipe in RECIPES.items():
        train_in(Path(folder) / name, recipe, TASKS[name](), fabric, context=mesh, save_every=0)
    finish(fabric)


if __name__ == "__main__":
    main(*sys.argv[1:])
