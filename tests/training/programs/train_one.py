"""Train a toy in a run directory, with a checkpoint after every epoch: train_one.py DIRECTORY."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy import one_process, toy_recipe, toy_task

from primal_attention.training import train_in

RECIPE = toy_recipe(epochs=20, refit=True)


def main(directory):
    torch.set_num_threads(1)
    train_in(Path(directory), RECIPE, toy_task(), one_process(), save_every=0)


if __name__ == "__main__":
    main(*globals().get("ARGUMENTS", sys.argv[1:]))
