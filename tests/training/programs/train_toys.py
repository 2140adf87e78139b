"""Train toys in run directories, in one process or two: train_toys.py FOLDER DEVICES STRATEGY..."""

import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy import toy_recipe, toy_task

from primal_attention.training import Watcher, finish, launch, train_in
from primal_attention.training.checkpoint import LAST

RECIPES = {
    "softmax": toy_recipe("softmax", dropout=0.0, clip_norm=0.2),
    "primal_plus": toy_recipe("primal_plus", dropout=0.0, clip_norm=0.2, eta=0.5, batch_size=10),
    "primalformer": toy_recipe(dropout=0.0, eta=0.0),
}


class Kept(Watcher):
    """Keeps where a run began, and the checkpoint of its second epoch for others to go on from."""

    def __init__(self, directory: Path):
        self.directory = directory

    def start(self, recipe, plan, progress):
        (self.directory / "began_after").write_text(str(len(progress.rounds)))

    def round(self, entry):
        if entry["epoch"] == 3:
            (self.directory / "second").mkdir()
            shutil.copy(self.directory / LAST, self.directory / "second")


def main(folder, devices, *strategies):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for strategy in strategies:
        fabric = launch(accelerator="cpu", devices=int(devices), strategy=strategy)
        for name, recipe in RECIPES.items():
            directory = Path(folder) / strategy / name
            watcher = Kept(directory)
            train_in(directory, recipe, toy_task(), fabric, watcher=watcher, save_every=0)
    finish(fabric)


if __name__ == "__main__":
    main(*sys.argv[1:])
