"""Training the networks of an estimator."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from primal_attention import tasks
from primal_attention.models import SequenceClassifier
from primal_attention.tasks.splits import Split
from primal_attention.timeseries.augmentation import AugmentedSeries
from primal_attention.timeseries.parameters import Parameters, device_type, recipe_of
from primal_attention.training import (
    Outcome,
    Recipe,
    Watcher,
    launch,
    progress_bar,
    train,
    trained_model,
)
from primal_attention.training.batch_plan import BatchPlan
from primal_attention.training.outcome import Entry, Progress
from primal_attention.uncertainty import is_uncertain, log_predictive

FEWEST_CASES = 10  # below, a part of them says nothing about the rest
MOST_TO_REFIT = 1000
Tensors = Mapping[str, Tensor]


class Ensemble(nn.Module):
    """Networks whose outputs are averaged."""

    def __init__(self, networks: Sequence[nn.Module]):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Compute logits [B, K] of series [B, N, C]."""
        return torch.stack([each(x, token_mask=token_mask) for each in self.networks]).mean(0)


class TrainedNetwork(NamedTuple):
    """One network, and its outputs for the cases that were held out of it, before any refit."""

    recipe: Recipe
    network: SequenceClassifier
    held_out: Tensor
    outputs: Tensor
    history: list[Entry]


class Told(Watcher):
    """Another watcher, beside functions that are called after each round."""

    def __init__(self, shown: Watcher, callbacks: Sequence[Callable[[dict[str, float]], None]]):
        self.shown, self.callbacks = shown, callbacks

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Pass it on, as ``step`` and ``stop`` do."""
        self.shown.start(recipe, plan, progress)

    def step(self, step: int) -> None:
        """Pass it on."""
        self.shown.step(step)

    def round(self, entry: Entry) -> None:
        """Call each."""
        self.shown.round(entry)
        for callback in self.callbacks:
            callback(dict(entry))

    def stop(self) -> None:
        """Pass it on."""
        self.shown.stop()


def together(networks: Sequence[SequenceClassifier]) -> SequenceClassifier | Ensemble | None:
    """Return one network as it is, several as one."""
    if len(networks) > 1:
        return Ensemble(networks).eval()
    return networks[0] if networks else None


def train_network(
    parameters: Parameters,
    goal: tasks.Goal,
    cases: AugmentedSeries,
    strata: NDArray[np.int64],
    sizes: tasks.Sizes,
    *,
    seed: int,
    refit: bool,
    weights: Tensors | None = None,
) -> TrainedNetwork:
    """Train one network; all of its cases are held out of each stratum alike.

    Args:
        parameters: Of the estimator.
        goal: What is minimised.
        cases: To train on, and what is held out of them.
        strata: Of each case.
        sizes: That the network is built for.
        seed: Of everything random.
        refit: Train anew on all cases, as long.
        weights: It starts from these.
    """
    split = hold_out(strata, parameters.valid_fraction, seed)
    selects = len(split.held_out) > 0
    recipe = recipe_of(
        parameters,
        seed,
        num_cases=len(split.kept),
        num_steps=sizes.num_tokens,
        selects=selects,
    )
    outcome = _trained(parameters, recipe, _task(goal, sizes, cases, split), weights)
    network = trained_model(recipe, sizes, outcome.weights)
    held_out = torch.from_numpy(split.held_out)
    outputs = outputs_of(network, cases[held_out].inputs, parameters)
    if refit and selects:
        tell(parameters, "training anew on all cases, as long")
        epochs = int(outcome.rounds[outcome.best]["epoch"])
        again = recipe.replace(epochs=epochs, eval_every=epochs, patience=None)
        everything = Split(np.arange(len(strata)), np.arange(0))
        weights = _trained(
            parameters, again, _task(goal, sizes, cases, everything), weights
        ).weights
        network = trained_model(recipe, sizes, weights)
    return TrainedNetwork(recipe, network, held_out, outputs, outcome.rounds)


def tell(parameters: Parameters, text: str) -> None:
    """Say on the standard error what comes next, if that is wanted."""
    if parameters.verbose:
        sys.stderr.write(f"{text}\n")


def hold_out(strata: NDArray[np.int64], fraction: float | None, seed: int) -> Split:
    """Cases to validate on, from each stratum alike; none where there are too few."""
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"valid_fraction must be in (0, 1) or None, got {fraction}")
    if fraction is None or _too_few(strata, fraction):
        return Split(kept=np.arange(len(strata)), held_out=np.arange(0))
    return tasks.stratified_split(strata, fraction, seed)


def _too_few(strata: NDArray[np.int64], fraction: float) -> bool:
    _, sizes = np.unique(strata, return_counts=True)
    cases = len(strata)
    return cases < FEWEST_CASES or sizes.min() < 2 or fraction * cases < 1


def _task(goal: tasks.Goal, sizes: tasks.Sizes, cases: AugmentedSeries, split: Split) -> tasks.Task:
    """Make the task of learning the kept cases; they validate too where none is held out."""
    train = cases.chosen(torch.from_numpy(split.kept))
    valid = cases.chosen(torch.from_numpy(split.held_out)) if len(split.held_out) else train
    return tasks.Task("timeseries", goal, sizes, train, valid, test=valid)


def _trained(
    parameters: Parameters, recipe: Recipe, task: tasks.Task, weights: Tensors | None
) -> Outcome:
    shown = progress_bar() if parameters.verbose else Watcher()
    device = device_type(parameters.device)
    fabric = launch(recipe.run.precision, accelerator=device, devices=1)
    return train(recipe, task, fabric, watcher=Told(shown, parameters.callbacks), weights=weights)


@torch.no_grad()
def outputs_of(model: Callable[..., Tensor], inputs: Tensors, parameters: Parameters) -> Tensor:
    """Compute the outputs of all cases by a model of the device, [B, K] in float64 on the CPU.

    With uncertainty they are logarithms of probabilities, which are means over draws.
    """
    device = device_type(parameters.device)
    answer: Any = model
    if draws := isinstance(model, nn.Module) and is_uncertain(model):
        answer = partial(log_predictive, model)

    def answers(first: int) -> Tensor:
        part = slice(first, first + parameters.predict_batch_size)
        outputs: Tensor = answer(**{name: each[part].to(device) for name, each in inputs.items()})
        return outputs.cpu().double()

    firsts = range(0, max(len(inputs["token_mask"]), 1), parameters.predict_batch_size)
    with torch.random.fork_rng(devices=[device] if device == "cuda" else [], enabled=draws):
        if draws:  # the same each time, so that classes are those of the probabilities
            torch.manual_seed(0)
        return torch.cat([answers(first) for first in firsts])
