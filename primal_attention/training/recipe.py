"""Recipes: frozen values that decide all of a training run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from primal_attention.foreign_files import UnreadableFileError
from primal_attention.models.stacks import MODELS
from primal_attention.objectives import OBJECTIVES
from primal_attention.tasks.audio import SOUND_AUGMENTATIONS
from primal_attention.tasks.images.augmentation import AUGMENTATIONS
from primal_attention.training.devices import PRECISIONS
from primal_attention.training.schedules import SCHEDULES

PROTOCOLS = ("paper", "clean")
OPTIMIZERS = ("radam", "adam", "adamw")
_CHOICES: dict[str, Collection[Any]] = {  # by field
    "augment": (*AUGMENTATIONS, *SOUND_AUGMENTATIONS),
    "name": MODELS,
    "objective": OBJECTIVES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "protocol": PROTOCOLS,
    "precision": PRECISIONS,
}
_AT_LEAST_ONE = (
    *("num_tokens", "image_size", "patch_size", "num_layers", "stride", "head_hidden_dim"),
    *("batch_size", "epochs", "steps", "eval_every", "patience"),
)
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {  # by field; None is not looked at
    **dict.fromkeys(_AT_LEAST_ONE, (lambda value: value >= 1, "at least 1")),
    **dict.fromkeys(
        ("context_tokens", "num_filters", "eta", "kl_weight", "weight_decay", "seed"),
        (lambda value: value >= 0, "not negative"),
    ),
    **dict.fromkeys(("lr", "adam_eps", "clip_norm"), (lambda value: value > 0, "positive")),
    **dict.fromkeys(("drop_path", "adam_beta2"), (lambda value: 0 <= value < 1, "in [0, 1)")),
    "valid_fraction": (
        lambda value: 0 <= value < 1,
        "in (0, 1), or 0 where the set has validation cases",
    ),
    "attention": (lambda value: isinstance(value, Mapping), "a mapping"),
    "num_towers": (lambda value: value in (1, 2), "1 or 2"),
    "warmup": (lambda value: 0 <= value <= 1, "between 0 and 1"),
}


class _Settings:
    """A section of a recipe."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by name."""
        for name, value in vars(self).items():
            choices = _CHOICES.get(name)
            if choices is not None and value not in choices:
                kind = "model" if name == "name" else name
                raise ValueError(f"no {kind} is called {value!r}; {nearest(value, choices)}")
            holds, what = _LIMITS.get(name, (None, ""))
            if holds is not None and value is not None and not holds(value):
                raise ValueError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True)
class DataSettings(_Settings):
    """Settings of reading and splitting the cases of a task."""

    #   Held out of train; 0: the set has validation cases; None: the test cases select.
    valid_fraction: float | None = 0.2
    num_tokens: int = 512  # of a window of text; samples of a clip
    context_tokens: int = 0  # of these, in an evaluation, come before those that count
    image_size: int = 224  # pixels of a side of a picture
    patch_size: int = 16  # pixels of a side of a token of it
    augment: str = "none"  # of pictures, a name of AUGMENTATIONS, or of SOUND_AUGMENTATIONS


@dataclass(frozen=True)
class ModelSettings(_Settings):
    """The network."""

    name: str  # a name of MODELS; its flat key is ``model``
    num_towers: int = 1  # 2: a case is a pair of sequences
    num_layers: int = 2
    dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048
    kernel_size: int = 1  # of the convolution that embeds vectors; odd
    stride: int = 1  # of that convolution
    num_filters: int = 0  # of a filterbank in its place, for sound
    norm: str = "post"  # of a block: "post" or "pre"
    pooling: str = "mean"  # of the tokens before the head
    head_hidden_dim: int | None = None  # of a hidden layer before the outputs
    dropout: float = 0.1
    drop_path: float = 0.0  # of whole branches of the last layer, of others in proportion: pictures
    mask_attention: bool = True  # False: padding leaks into attention, as released for UEA
    mask_primal: bool = True  # False: it leaks into Primal layers alone, as released for LRA
    uncertainty: bool = False  # Gaussian processes on the scores of the last Primal layer
    attention: Mapping[str, Any] = field(default_factory=dict)  # options of the mechanism


@dataclass(frozen=True)
class OptimSettings(_Settings):
    """The loss and how it is minimised."""

    eta: float = 0.0  # weight of the KSVD objective
    objective: str = "released"  # a name of OBJECTIVES
    kl_weight: float = 1.0  # of the KL divergence over the number of cases, with uncertainty
    optimizer: str = "radam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    adam_eps: float = 1e-8
    adam_beta2: float = 0.999
    batch_size: int = 16
    epochs: int = 100
    steps: int | None = None  # in place of epochs: batches are then all full
    schedule: str = "constant"  # a name of SCHEDULES
    warmup: float = 0.0  # the part of all steps in which the learning rate rises
    clip_norm: float | None = 4.0

    @property
    def unit(self) -> str:
        """Unit that the length of a run is counted in, epoch or step."""
        return "epoch" if self.steps is None else "step"


@dataclass(frozen=True)
class RunSettings(_Settings):
    """Settings of selecting, repeating and computing a run."""

    protocol: str = "clean"  # one of PROTOCOLS
    seed: int = 0  # of weights, order and split
    eval_every: int = 1  # epochs between two evaluations; steps where steps are given
    patience: int | None = None  # evaluations without a better one before training stops
    refit: bool = False  # then train anew, as long as the best epoch, on validation cases too
    precision: str = "fp32"  # one of PRECISIONS
    graph: bool = True  # on one CUDA device, replay the step as a graph
    compile: bool = False  # train through torch.compile; evaluations are as without it


_SECTIONS: dict[str, Any] = {
    "data": DataSettings,
    "model": ModelSettings,
    "optim": OptimSettings,
    "run": RunSettings,
}


#   The section and the field of each flat key, as users write them.
_PLACES: dict[str, tuple[str, str]] = {
    each.name if each.name != "name" else section: (section, each.name)
    for section, kind in _SECTIONS.items()
    for each in fields(kind)
}
SETTINGS = ("task", *_PLACES)


@dataclass(frozen=True, init=False)
class Recipe:
    """Everything that decides the outcome of a training run, in one frozen value.

    Settings are given, written and read flat, ``Recipe("uea/Heartbeat", "softmax", dim=64)``, and
    kept by section, ``recipe.model.dim``.

    Args:
        task: domain/set, for instance ``uea/JapaneseVowels``.
        model: A name of ``MODELS``; ``recipe.model.name``.
        protocol: paper or clean.
        seed: Seed of weights, order and split.
        **settings: Any other field of the four sections, by its name.
    """

    task: str
    data: DataSettings
    model: ModelSettings
    optim: OptimSettings
    run: RunSettings

    def __init__(
        self, task: str, model: str, protocol: str = "clean", seed: int = 0, **settings: Any
    ):
        settings |= {"model": model, "protocol": protocol, "seed": seed}
        parts: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for key, value in settings.items():
            if key not in _PLACES:
                raise TypeError(_no_setting(key))
            section, name = _PLACES[key]
            parts[section][name] = value
        object.__setattr__(self, "task", task)
        for section, kind in _SECTIONS.items():
            object.__setattr__(self, section, kind(**parts[section]))
        if self.run.refit and self.data.valid_fraction is None:
            raise ValueError("refit=True needs a valid_fraction: the test cases are not trained on")

    @property
    def domain(self) -> str:
        """The domain of the task, for instance uea."""
        return self.task.partition("/")[0]

    @property
    def set_name(self) -> str:
        """The data set of the task, for instance JapaneseVowels."""
        return self.task.partition("/")[2]

    def flat(self) -> dict[str, Any]:
        """Return all settings by their flat keys."""
        values = {
            key: getattr(getattr(self, section), name) for key, (section, name) in _PLACES.items()
        }
        return {"task": self.task, **values, "attention": dict(self.model.attention)}

    def replace(self, **settings: Any) -> Recipe:
        """Return the recipe with other values of some flat keys."""
        return Recipe(**{**self.flat(), **settings})

    def to_json(self) -> str:
        """Return the flat settings as text, which ``from_json`` reads."""
        return json.dumps(self.flat(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read the recipe that ``to_json`` wrote."""
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ValueError(f"a recipe is an object of settings, got {settings!r:.60}")
        for key in settings:
            if key not in SETTINGS:
                raise ValueError(_no_setting(key))
        return cls(**settings)

    def check_same(self, other: Recipe, place: Path) -> None:
        """Raise unless another recipe, found at that place, is this one."""
        ours, theirs = (json.loads(each.to_json()) for each in (self, other))
        changed = [f"{key}={theirs[key]!r}" for key in ours if theirs[key] != ours[key]]
        if changed:
            raise UnreadableFileError(
                f"{place} holds a run of another recipe ({', '.join(changed)}); "
                "choose another directory or remove it"
            )

    def with_settings(self, settings: Iterable[str]) -> Recipe:
        """Return the recipe with ``key=value`` settings; ``attention.key=value`` is an option."""
        values = self.flat()
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise ValueError(f"a setting is key=value, got {setting!r}")
            if key.startswith("attention."):
                values["attention"][key.removeprefix("attention.")] = _literal(text)
            elif key in SETTINGS and key != "attention":
                values[key] = _converted(key, text)
            else:
                raise ValueError(_no_setting(key))
        return Recipe(**values)


def _no_setting(key: str) -> str:
    names = [each for each in SETTINGS if each != "attention"]
    return f"no setting is called {key!r}; {nearest(key, names)}"


def nearest(name: str, names: Collection[str]) -> str:
    """Suggest the nearest names, or list all."""
    near = get_close_matches(name, names, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(names)}"


def _converted(key: str, text: str) -> Any:
    """Convert text to the type of a setting; None where the setting may be None."""
    if key == "task":
        return text
    section, name = _PLACES[key]
    kind = get_type_hints(_SECTIONS[section])[name]
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    plain = next(each for each in kinds if each is not type(None))
    try:
        return _truth(text) if plain is bool else plain(text)
    except ValueError:
        article = "an" if plain is int else "a"
        raise ValueError(f"{key} must be {article} {plain.__name__}, got {text!r}") from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _literal(text: str) -> Any:
    """Parse an option: a number, true, false, none, a list, or else the text itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except json.JSONDecodeError:
        return None if text.lower() == "none" else text
