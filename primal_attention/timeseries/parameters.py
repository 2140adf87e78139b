"""Parameters of an estimator, and the recipe of the training run that they describe."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from primal_attention.models.stacks import mechanism_of
from primal_attention.training import Recipe
from primal_attention.training.recipe import SETTINGS

DEVICES = ("auto", "cpu", "cuda")
_OPTIONS = {
    "primal": ("num_directions", "samples_per_direction", "landmark_dropout", "landmark_jitter"),
    "primal_time": ("num_directions",),
}


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The parameters of an estimator; all defaults stand here.

    Args:
        model: A name of ``primal_attention.models.MODELS``: which attention is in which layer.
        num_layers: Number of layers.
        dim: Model dimension, a multiple of ``num_heads``.
        num_heads: Number of heads.
        ffn_dim: Width of the feed-forward networks.
        num_directions: Directions s of a Primal layer; other mechanisms have none.
        samples_per_direction: Landmarks of a Primal layer for each direction.
        landmark_dropout: Probability of dropping a landmark of a Primal layer in training.
        landmark_jitter: By how many spacings a landmark of a Primal layer moves in training.
        attention: Further options of the mechanism, by name.
        kernel_size: How many neighbouring time steps a token is made of; odd.
        pooling: What the head reads: ``"mean"``, ``"class_token"`` or ``"flatten"``.
        dropout: Probability of dropout.
        eta: Weight of the KSVD objective in the loss; 0 leaves it out.
        objective: Which KSVD objective, a name that ``ksvd_loss`` knows.
        lr: Learning rate, the highest one where there is a schedule.
        schedule: How it changes, a name of ``primal_attention.training.schedules.SCHEDULES``.
        warmup: The part of all steps in which it rises.
        batch_size: Cases of a step.
        epochs: Passes over the training cases, at most.
        patience: Epochs without a better validation before training stops; None never stops.
        valid_fraction: The part of the cases that is held out of training to choose the best
            epoch. With None, fewer than 10 cases or a class of one case, nothing is held out and
            the weights after the last epoch are kept.
        refit: Whether to train anew, as long as the best epoch, on the held-out cases too.
        random_state: Seed of everything random, a ``RandomState``, or None.
        n_jobs: Threads while fitting and predicting; -1 uses all processors.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU if there is one.
        verbose: Whether to show on the standard error how fitting goes.
    """

    model: str = "primalformer"
    num_layers: int = 2
    dim: int = 128
    num_heads: int = 8
    ffn_dim: int = 256
    num_directions: int = 30
    samples_per_direction: int = 10
    landmark_dropout: float = 0.5
    landmark_jitter: float = 0.6
    attention: Mapping[str, Any] | None = None
    kernel_size: int = 9
    pooling: str = "mean"
    dropout: float = 0.1
    eta: float = 0.0
    objective: str = "released"
    lr: float = 1e-3
    schedule: str = "one_cycle"
    warmup: float = 0.1
    batch_size: int = 16
    epochs: int = 100
    patience: int | None = None
    valid_fraction: float | None = 0.2
    refit: bool = True
    random_state: int | np.random.RandomState | None = None
    n_jobs: int | None = 1
    device: str = "auto"
    verbose: bool = False

    def __post_init__(self) -> None:
        """Call the constructor of the estimator's base class."""
        super().__init__()


def recipe_of(parameters: Parameters, seed: int, *, selects: bool) -> Recipe:
    """Make the recipe of the parameters; one round where there is nothing to select on."""
    names = {*SETTINGS} - {"attention", "patience", "valid_fraction", "refit"}
    values = plain_values(parameters)
    options = {name: values[name] for name in _OPTIONS.get(mechanism_of(values["model"]), ())}
    return Recipe(
        **{name: value for name, value in values.items() if name in names},
        task="timeseries",
        seed=seed,
        attention={**options, **(values["attention"] or {})},
        valid_fraction=values["valid_fraction"] if selects else None,
        patience=values["patience"] if selects else None,
        refit=values["refit"] and selects,
        eval_every=1 if selects else values["epochs"],
    )


def plain_values(parameters: Parameters) -> dict[str, Any]:
    """Return the parameters as numbers and strings of Python, which JSON knows."""
    return {each.name: _plain(getattr(parameters, each.name)) for each in fields(Parameters)}


def num_threads(n_jobs: int | None) -> int:
    """Return the threads that ``n_jobs`` stands for, in the convention of scikit-learn."""
    if not isinstance(n_jobs, int | np.integer | None):
        raise ValueError(f"n_jobs must be an integer or None, got {n_jobs!r}")
    if not n_jobs:
        return 1
    return int(n_jobs) if n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + int(n_jobs))


def device_type(device: str) -> str:
    """Return ``cpu`` or ``cuda``; raise if it is not available."""
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch sees no GPU; take 'auto' or 'cpu'")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value
