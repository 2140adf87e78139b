"""Train the recipes of studies and measure their accuracy on inputs that are not as in training.

    python reproduction/robustness.py primal_attention/ablations/robustness --runs runs/ablations

Beside results.csv, robustness.csv has one row a run and change of the test cases: their accuracy.
Channels are standardised, so a level of 1 is one standard deviation of the training cases.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from measuring import Numbers, Trained, main, parse_arguments
from torch import Tensor

from primal_attention.tasks import Cases

FILE, BATCH = "robustness.csv", 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Corruption(NamedTuple):
    """A change of sequences [n, N, C] with real tokens [n, N], and how strong it is."""

    name: str
    change: Callable[[Tensor, Tensor, float], Tensor]
    levels: tuple[float, ...]


def noise(x: Tensor, mask: Tensor, level: float) -> Tensor:
    """Independent normal noise at each token and channel."""
    return x + level * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def offset(x: Tensor, mask: Tensor, level: float) -> Tensor:
    """Every token moved by the same amount in every channel: a sensor that has drifted."""
    return x + level


def scale(x: Tensor, mask: Tensor, level: float) -> Tensor:
    """Other units."""
    return x * level


def delay(x: Tensor, mask: Tensor, level: float) -> Tensor:
    """Each sequence moved to the right by that part of its length; its end comes first."""
    lengths = mask.sum(1, keepdim=True)
    places = torch.arange(x.shape[1]).expand(mask.shape)
    moved = (places - (level * lengths).long()) % lengths.clamp(min=1)
    source = torch.where(mask, moved, places)
    return x.gather(1, source[..., None].expand_as(x))


CORRUPTIONS = (
    Corruption("none", lambda x, mask, level: x, (0.0,)),
    Corruption("noise", noise, (0.1, 0.2, 0.5, 1.0)),
    Corruption("offset", offset, (0.1, 0.2, 0.5, 1.0)),
    Corruption("scale", scale, (0.5, 0.8, 1.25, 2.0)),
    Corruption("delay", delay, (0.05, 0.1, 0.2)),
)


def robustness(trained: Trained) -> dict[str, list[Numbers]]:
    """One row a change and level."""
    trained.model.to(DEVICE)
    rows = [
        {"corruption": name, "level": level, "accuracy": accuracy(trained, changed)}
        for name, level, changed in corrupted(trained.task.test)
    ]
    return {FILE: rows}


def corrupted(cases: Cases) -> Iterator[tuple[str, float, Cases]]:
    """The cases with each change of their real tokens."""
    x = cases.inputs["x"]
    mask = cases.inputs.get("token_mask", torch.ones(x.shape[:2], dtype=torch.bool))
    for name, change, levels in CORRUPTIONS:
        for level in levels:
            changed = torch.where(mask[..., None], change(x, mask, level), x)
            yield name, level, Cases({**cases.inputs, "x": changed}, cases.target)


@torch.no_grad()
def accuracy(trained: Trained, cases: Cases) -> float:
    """In percent."""
    cases, every = cases.to(DEVICE), torch.arange(len(cases), device=DEVICE)
    hits = [
        trained.task.goal.scores(trained.model(**batch.inputs), batch.target)
        for batch in (cases[indices] for indices in every.split(BATCH))
    ]
    return 100 * float(torch.cat(hits).mean())


if __name__ == "__main__":
    main(robustness, FILE, parse_arguments(str(__doc__)))
