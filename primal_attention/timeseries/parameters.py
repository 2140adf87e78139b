"""Parameters of an estimator, and the recipe of the training run that they describe."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from primal_attention.models.stacks import mechanism_of
from primal_attention.training import Recipe
from primal_attention.training.recipe import SETTINGS

DEVICES = ("auto", "cpu", "cuda")
PRESETS: dict[str, dict[str, int]] = {
    "fast": {"num_features": 20_000, "num_networks": 0},
    "default": {"num_features": 20_000, "num_networks": 1},
    "best": {"num_features": 40_000, "num_networks": 5},
}
_STEPS = 500  # of training, where the epochs are not given
_OPTIONS = {
    "primal": ("num_directions", "samples_per_direction", "landmark_dropout", "landmark_jitter"),
    "primal_time": ("num_directions",),
}


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The parameters of an estimator; all defaults stand here.

    Args:
        preset: ``"fast"``: the machine on random convolutions alone; ``"default"``: with a network;
            ``"best"``: with five networks and twice the features.
        num_features: Features of the machine on random convolutions, 0: no such machine; None: as
            the preset has it.
        num_networks: Networks, of which each holds out cases of its own; None: as the preset.
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
        uncertainty: Whether the last Primal layer has Gaussian processes on its scores; then
            probabilities of a classifier are means over draws. Not of a regressor.
        kernel_size: How many neighbouring time steps a token is made of; odd. None: a fiftieth of
            the longest series, or as many as the tokens need not to leave any out.
        max_tokens: Tokens at most: of longer series only every so many steps begin one.
        norm: Of a block: ``"pre"`` or ``"post"``.
        pooling: What the head reads: ``"adaptive"``, ``"mean"``, ``"class_token"``, ``"flatten"``.
        dropout: Probability of dropout.
        noise: Noise in training, in standard deviations, of each step and of each channel's scale.
        time_mask: The part of a series that is hidden in training.
        channel_dropout: Probability with which a channel is hidden in training.
        mixup: Parameter of the mixing of two series in training; 0: none are mixed.
        label_smoothing: The part of a class's probability that all share in training.
        eta: Weight of the KSVD objective in the loss; 0 leaves it out.
        objective: Which KSVD objective, a name that ``ksvd_loss`` knows.
        lr: Learning rate, the highest one where there is a schedule.
        schedule: How it changes, a name of ``primal_attention.training.schedules.SCHEDULES``.
        warmup: The part of all steps in which it rises.
        batch_size: Cases of a step.
        epochs: Passes over the training cases, at most. None: about 500 steps, but no fewer
            epochs than 10 and no more than 100.
        patience: Epochs without a better validation before training stops, and the best epoch is
            kept. None: all epochs are run and the last weights kept.
        valid_fraction: The part of the cases that is held out of training, to weigh networks and
            machine, to calibrate the probabilities and to choose the best epoch. With None, fewer
            than 10 cases or a class of one case, nothing is held out.
        refit: Whether to train anew, as long, on the held-out cases too. None: where the cases are
            fewer than 1,000 and there is one network.
        class_weight: Weights of the classes by label, ``"balanced"``: equal shares; None: none.
        warm_start: Whether ``fit`` begins with the networks of the fit before.
        callbacks: Are called with the losses after each round of training, as in ``history_``.
        predict_batch_size: Cases that are predicted at a time.
        random_state: Seed of everything random, a ``RandomState``, or None.
        n_jobs: Threads while fitting and predicting; -1 uses all processors.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU if there is one.
        verbose: Whether to show on the standard error how fitting goes.
    """

    preset: Literal["fast", "default", "best"] = "default"
    num_features: int | None = None
    num_networks: int | None = None
    model: str = "primalformer_time"
    num_layers: int = 2
    dim: int = 64
    num_heads: int = 4
    ffn_dim: int = 128
    num_directions: int = 16
    samples_per_direction: int = 10
    landmark_dropout: float = 0.5
    landmark_jitter: float = 0.6
    attention: Mapping[str, Any] | None = None
    uncertainty: bool = False
    kernel_size: int | None = None
    max_tokens: int = 64
    norm: str = "pre"
    pooling: str = "adaptive"
    dropout: float = 0.1
    noise: float = 0.1
    time_mask: float = 0.1
    channel_dropout: float = 0.0
    mixup: float = 0.2
    label_smoothing: float = 0.1
    eta: float = 0.0
    objective: str = "released"
    lr: float = 2e-3
    schedule: str = "one_cycle"
    warmup: float = 0.2
    batch_size: int = 16
    epochs: int | None = None
    patience: int | None = None
    valid_fraction: float | None = 0.2
    refit: bool | None = None
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    warm_start: bool = False
    callbacks: Sequence[Callable[[dict[str, float]], None]] = ()
    predict_batch_size: int = 128
    random_state: int | np.random.RandomState | None = None
    n_jobs: int | None = 1
    device: str = "auto"
    verbose: bool = False

    def __post_init__(self) -> None:
        """Call the constructor of the estimator's base class."""
        super().__init__()


def preset_of(parameters: Parameters) -> tuple[int, int]:
    """Return the numbers of features and of networks."""
    if parameters.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"preset must be one of {known}, got {parameters.preset!r}")
    preset, given = PRESETS[parameters.preset], (parameters.num_features, parameters.num_networks)
    names = ("num_features", "num_networks")
    numbers = [
        preset[name] if each is None else each for name, each in zip(names, given, strict=True)
    ]
    if min(numbers) < 0 or not any(numbers):
        raise ValueError(
            "num_features and num_networks must not be negative, nor both zero, got "
            f"{numbers[0]} and {numbers[1]}"
        )
    return numbers[0], numbers[1]


def recipe_of(
    parameters: Parameters, seed: int, *, num_cases: int, num_steps: int, selects: bool
) -> Recipe:
    """Make the recipe of a network; one round where there is nothing to select on.

    Args:
        parameters: Of the estimator.
        seed: Of the network.
        num_cases: Cases that it is trained on.
        num_steps: The length of the longest.
        selects: Whether cases are held out.
    """
    names = {*SETTINGS} - {"attention", "patience", "valid_fraction", "refit"}
    values = plain_values(parameters)
    if parameters.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {parameters.max_tokens}")
    stride = -(-num_steps // parameters.max_tokens)
    if values["kernel_size"] is None:
        values["kernel_size"] = max(3, num_steps // 50, 2 * stride - 1) // 2 * 2 + 1
    if values["epochs"] is None:
        steps = -(-num_cases // parameters.batch_size)
        values["epochs"] = min(max(-(-_STEPS // steps), 10), 100)
    options = {name: values[name] for name in _OPTIONS.get(mechanism_of(values["model"]), ())}
    return Recipe(
        **{name: value for name, value in values.items() if name in names},
        task="timeseries",
        seed=seed,
        stride=stride,
        optimizer="adamw",
        weight_decay=0.01,
        attention={**options, **(values["attention"] or {})},
        valid_fraction=values["valid_fraction"] if selects else None,
        patience=values["patience"] if selects else None,
        eval_every=1 if selects and values["patience"] else values["epochs"],
    )


def plain_values(parameters: Parameters) -> dict[str, Any]:
    """Return the parameters as numbers and strings of Python, which JSON knows; no callbacks."""
    names = (each.name for each in fields(Parameters) if each.name != "callbacks")
    return {name: _plain(getattr(parameters, name)) for name in names}


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
