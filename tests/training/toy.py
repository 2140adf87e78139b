"""A task that a small model learns in a second, and recipes for it."""

import logging

import torch

from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import Recipe, Watcher, launch

N, CHANNELS, CLASSES = 11, 5, 3
TRAIN, VALID, TEST = 49, 31, 29  # of two processes one has no case in the last batch of 16


def make_cases(generator, count):
    target = torch.randint(CLASSES, (count,), generator=generator)
    x = torch.randn(count, N, CHANNELS, generator=generator, dtype=torch.float64)
    x = (x + target[:, None, None]).to(torch.get_default_dtype())
    lengths = torch.randint(3, N + 1, (count, 1), generator=generator)
    return Cases({"x": x, "token_mask": torch.arange(N) < lengths}, target)


def toy_task():
    generator = torch.Generator().manual_seed(0)
    cases = [make_cases(generator, count) for count in (TRAIN, VALID, TEST)]
    return Task("toy", CLASSIFICATION, Sizes(N, CLASSES, num_channels=CHANNELS), *cases)


def toy_recipe(model="primalformer", **settings):
    defaults = {
        "dim": 8,
        "num_heads": 2,
        "ffn_dim": 13,
        "epochs": 5,
        "eta": 0.1,
        "attention": {"num_directions": 3},
    }
    if model == "softmax":
        defaults |= {"eta": 0.0, "attention": {}}
    return Recipe("toy/toy", model, **defaults | settings)


def one_process(precision="fp32"):
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    return launch(precision, accelerator="cpu", devices=1)


class Interrupted(Watcher):
    """Interrupts a run at the end of an epoch, before it is saved."""

    def __init__(self, epoch):
        self.epoch = epoch

    def round(self, entry):
        if entry["epoch"] == self.epoch:
            raise KeyboardInterrupt
