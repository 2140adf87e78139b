"""A recipe: everything that decides the outcome of a training run, in one frozen value."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from primal_attention.atomic_files import UnreadableFileError
from primal_attention.models.stacks import MODELS
from primal_attention.objectives import OBJECTIVES
from primal_attention.tasks.images.augmentation import AUGMENTATIONS
from primal_attention.training.schedules import SCHEDULES

PROTOCOLS = ("paper", "clean")
OPTIMIZERS = ("radam", "adam", "adamw")
PRECISIONS = ("fp32", "bf16", "fp16")


class TaskName(NamedTuple):
    """The two parts of ``domain/set``; the set is empty where there is no slash."""

    domain: str
    set: str

    @classmethod
    def of(cls, task: str) -> TaskName:
        """Split the name of a task."""
        domain, _, name = task.partition("/")
        return cls(domain, name)


@dataclass(frozen=True)
class Recipe:
    """Data, model, objective and optimisation of one run; a run is a function of this value."""

    task: str  # domain/set, for instance uea/JapaneseVowels
    model: str  # a name of MODELS
    protocol: str = "clean"
    seed: int = 0
    #   Held out of train; 0: the set has validation cases; None: the test cases select.
    valid_fraction: float | None = 0.2

    num_tokens: int = 512  # of a window of text
    context_tokens: int = 0  # of these, in an evaluation, come before those that count

    image_size: int = 224  # pixels of a side of a picture
    patch_size: int = 16  # of a token of it
    augment: str = "none"  # what pictures go through: a name of AUGMENTATIONS

    num_towers: int = 1  # 2: a case is a pair of sequences
    num_layers: int = 2
    dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048
    kernel_size: int = 1  # of the map that embeds vectors; odd
    norm: str = "post"
    pooling: str = "mean"
    head_hidden_dim: int | None = None  # of a hidden layer before the outputs
    dropout: float = 0.1
    drop_path: float = 0.0  # of whole branches of the last layer, of others in proportion: pictures
    mask_attention: bool = True  # False: padding leaks into attention, as released for UEA
    mask_primal: bool = True  # False: it leaks into Primal layers alone, as released for LRA
    attention: Mapping[str, Any] = field(default_factory=dict)  # options of the mechanism

    eta: float = 0.0  # weight of the KSVD objective
    objective: str = "released"

    optimizer: str = "radam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    adam_eps: float = 1e-8
    adam_beta2: float = 0.999
    batch_size: int = 16
    epochs: int = 100
    steps: int | None = None  # in place of epochs: batches are then all full
    schedule: str = "constant"
    warmup: float = 0.0  # the part of all steps in which the learning rate rises
    clip_norm: float | None = 4.0
    eval_every: int = 1  # epochs between two evaluations; steps where steps are given
    patience: int | None = None  # evaluations without a better one before training stops
    refit: bool = False  # then train anew, as long as the best epoch, on validation cases too
    precision: str = "fp32"
    graph: bool = True  # on one CUDA device, replay the step as a graph
    compile: bool = False  # train through torch.compile; evaluations are as without it

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, by name."""
        _check_choices(
            model=(self.model, MODELS),
            protocol=(self.protocol, PROTOCOLS),
            optimizer=(self.optimizer, OPTIMIZERS),
            schedule=(self.schedule, SCHEDULES),
            objective=(self.objective, OBJECTIVES),
            precision=(self.precision, PRECISIONS),
            augment=(self.augment, AUGMENTATIONS),
        )
        for name in ("image_size", "patch_size"):
            _check(name, getattr(self, name), lambda value: value >= 1, "at least 1")
        _check("drop_path", self.drop_path, lambda value: 0 <= value < 1, "in [0, 1)")
        for name in ("num_tokens", "num_layers", "batch_size", "epochs", "eval_every"):
            _check(name, getattr(self, name), lambda value: value >= 1, "at least 1")
        for name in ("steps", "head_hidden_dim", "patience"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), lambda value: value >= 1, "at least 1")
        _check("num_towers", self.num_towers, lambda value: value in (1, 2), "1 or 2")
        for name in ("context_tokens", "eta", "weight_decay"):
            _check(name, getattr(self, name), lambda value: value >= 0, "not negative")
        _check("seed", self.seed, lambda value: value >= 0, "not negative")
        for name in ("lr", "adam_eps"):
            _check(name, getattr(self, name), lambda value: value > 0, "positive")
        _check("adam_beta2", self.adam_beta2, lambda value: 0 <= value < 1, "in [0, 1)")
        _check("warmup", self.warmup, lambda value: 0 <= value <= 1, "between 0 and 1")
        if self.clip_norm is not None:
            _check("clip_norm", self.clip_norm, lambda value: value > 0, "positive")
        if self.refit and self.valid_fraction is None:
            raise ValueError("refit=True needs a valid_fraction: the test cases are not trained on")
        if self.valid_fraction is not None:
            what = "in (0, 1), or 0 where the set has validation cases"
            _check("valid_fraction", self.valid_fraction, lambda value: 0 <= value < 1, what)

    @property
    def domain(self) -> str:
        """The domain of the task, for instance uea."""
        return TaskName.of(self.task).domain

    @property
    def set_name(self) -> str:
        """The data set of the task, for instance JapaneseVowels."""
        return TaskName.of(self.task).set

    def to_json(self) -> str:
        """The recipe as text, which ``from_json`` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that ``to_json`` wrote."""
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ValueError(f"a recipe is an object of settings, got {settings!r:.60}")
        names = [each.name for each in fields(cls)]
        for key in settings:
            if key not in names:
                raise ValueError(f"no setting is called {key!r}; {nearest(key, names)}")
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
        """The recipe with ``key=value`` settings; ``attention.key=value`` is an option of it."""
        recipe = self
        for setting in settings:
            recipe = recipe._with_setting(setting)
        return recipe

    def _with_setting(self, setting: str) -> Recipe:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting is key=value, got {setting!r}")
        if key.startswith("attention."):
            option = key.removeprefix("attention.")
            return replace(self, attention={**self.attention, option: _literal(text)})
        types = get_type_hints(type(self))
        names = [each.name for each in fields(self) if each.name != "attention"]
        if key not in names:
            raise ValueError(f"no setting is called {key!r}; {nearest(key, names)}")
        return replace(self, **{key: _converted(key, text, types[key])})


def nearest(name: str, names: Collection[str]) -> str:
    """A hint for someone who got a name wrong."""
    near = get_close_matches(name, names, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(names)}"


def _check_choices(**choices: tuple[str, Collection[str]]) -> None:
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"no {name} is called {value!r}; {nearest(value, allowed)}")


def _check(name: str, value: Any, holds: Callable[[Any], bool], what: str) -> None:
    if not holds(value):
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _converted(key: str, text: str, kind: Any) -> Any:
    """The text as a value of the field's type; None where the field allows it."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    plain = next(each for each in kinds if each is not type(None))
    try:
        return _truth(text) if plain is bool else plain(text)
    except ValueError:
        raise ValueError(f"{key} must be a {plain.__name__}, got {text!r}") from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _literal(text: str) -> Any:
    """An option of a mechanism: a number, true, false, none, a list, or else the text itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except json.JSONDecodeError:
        return None if text.lower() == "none" else text
