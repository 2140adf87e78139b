"""A network for time series: trained on arrays, and asked about others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.models import SequenceClassifier
from primal_attention.tasks import (
    Cases,
    Goal,
    Series,
    SeriesEncoding,
    Sizes,
    Task,
    stratified_split,
)
from primal_attention.tasks.splits import Split
from primal_attention.training import Recipe
from primal_attention.training.model_factory import trained_model

_FEWEST_CASES = 10  # below, a part of them says nothing about the rest
_BATCH_SIZE = 128


def hold_out(strata: NDArray[np.int64], fraction: float | None, seed: int) -> Split:
    """Cases to validate on, from each stratum alike; none where there are too few."""
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"valid_fraction must be in (0, 1) or None, got {fraction}")
    if fraction is None or _too_few(strata, fraction):
        return Split(kept=np.arange(len(strata)), held_out=np.arange(0))
    return stratified_split(strata, fraction, seed)


def _too_few(strata: NDArray[np.int64], fraction: float) -> bool:
    _, sizes = np.unique(strata, return_counts=True)
    cases = len(strata)
    return cases < _FEWEST_CASES or sizes.min() < 2 or fraction * cases < 1


def task_of(
    goal: Goal, num_outputs: int, series: Series, target: NDArray[Any], split: Split
) -> Task:
    """The task of learning the kept cases; where none is held out they are the valid ones too."""
    encoding = SeriesEncoding.fit([series[i] for i in split.kept])

    def cases(part: NDArray[np.int64]) -> Cases:
        return Cases(encoding.encode([series[i] for i in part]), torch.from_numpy(target[part]))

    train = cases(split.kept)
    valid = cases(split.held_out) if len(split.held_out) else train
    sizes = sizes_of(encoding, num_outputs)
    return Task("timeseries", goal, sizes, train, valid, test=valid, encoding=encoding)


def sizes_of(encoding: SeriesEncoding, num_outputs: int) -> Sizes:
    """What a network has to know of the cases."""
    return Sizes(encoding.num_tokens, num_outputs, num_channels=encoding.num_channels)


def build_network(
    recipe: Recipe, sizes: Sizes, weights: Mapping[str, Tensor]
) -> SequenceClassifier:
    """The network of a recipe with trained weights, on the CPU."""
    network: SequenceClassifier = trained_model(recipe, sizes, weights)
    return network


@torch.no_grad()
def outputs_of(network: SequenceClassifier, inputs: Mapping[str, Tensor], device: str) -> Tensor:
    """What the network makes of all cases, [B, K] in float64 on the CPU; it stays where it is."""
    network = network if device == "cpu" else deepcopy(network).to(device)

    def answers(part: slice) -> Tensor:
        outputs: Tensor = network(**{name: each[part].to(device) for name, each in inputs.items()})
        return outputs.cpu().double()

    starts = range(0, len(inputs["token_mask"]), _BATCH_SIZE)
    return torch.cat([answers(slice(start, start + _BATCH_SIZE)) for start in starts])


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for PyTorch, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
