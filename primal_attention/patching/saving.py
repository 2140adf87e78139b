"""Patched models on the disk: safetensors and JSON, so reading one runs no code.

Beside them are their checksums, as ``sha256sum`` writes them, which are compared before anything is
loaded.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from primal_attention import atomic_files
from primal_attention.extras import needing
from primal_attention.foreign_files import REMEDY, UnreadableFileError, reading
from primal_attention.patching.hosts.transformers_padding import choose_masks
from primal_attention.patching.patch import (
    KEY,
    apply_description,
    describe,
    note_in_config,
    without_data,
)
from primal_attention.patching.sites import patched_layers
from primal_attention.state_dicts import check_fit

_CONFIG, _WEIGHTS, _DESCRIPTION = "config.json", "model.safetensors", f"{KEY}.json"
_CHECKSUMS = f"{KEY}.sha256"
_CHECKED = (_CONFIG, _DESCRIPTION, "*.safetensors", "*.safetensors.index.json")


def save_patched(model: nn.Module, folder: str | Path) -> None:
    """Write a patched model into a folder.

    A model of transformers is saved by its own ``save_pretrained``, with what was patched in its
    ``config.json``; any other as ``model.safetensors`` and ``primal_attention.json``. The checksums
    of these files go to ``primal_attention.sha256``.
    """
    description = describe(model)
    if not description["layers"]:
        raise ValueError(f"{type(model).__name__} has no patched layer to save")
    try:
        text = json.dumps(description, indent=2)
    except TypeError as error:
        raise ValueError(f"an option of a patched layer is no JSON value: {error}") from error
    folder = Path(folder)
    with _naming_place(folder):
        save_pretrained: Any = getattr(model, "save_pretrained", None)
        if save_pretrained is not None:
            note_in_config(model)
            save_pretrained(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_files.replacing(folder / _WEIGHTS) as temporary:
                _safetensors().save_model(model, str(temporary))
            atomic_files.write_text(folder / _DESCRIPTION, text)
    sums = {path.name: atomic_files.checksum_of(path) for path in _checked_files(folder)}
    atomic_files.write_text(
        folder / _CHECKSUMS, "".join(f"{sums[name]}  {name}\n" for name in sums)
    )


def load_patched(
    folder: str | Path, model: nn.Module | type[nn.Module] | None = None, **options: Any
) -> Any:
    """Read what ``save_patched`` (or ``save_pretrained`` of a patched model) wrote.

    Nothing is downloaded.

    Args:
        folder: Where it was written, or wherever it was moved to; or the name of a model of the
            Hugging Face hub, ``"owner/name"``, that is in the hub's cache on this machine.
        model: For a model of transformers, nothing, or the class to load it as. For any other, the
            unpatched model, newly built; it is patched and its weights are replaced, in place.
        **options: Passed to ``from_pretrained`` of transformers.

    Returns:
        The patched model, in evaluation mode if it is one of transformers.

    Raises:
        UnreadableFileError: A file is damaged, or of something else. A model that was passed is as
            it was before.
    """
    place = _find(folder)
    if isinstance(model, nn.Module):
        return _load_into(model, place)
    return _load_pretrained(place, model, options)


def _find(folder: str | Path) -> Path:
    """The folder itself, or that of a downloaded model of this name."""
    if Path(folder).exists():
        return Path(folder)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(folder), local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no patched model is at {folder}: there is no such folder, and no model of that name "
            "in the hub's cache; huggingface_hub.snapshot_download downloads one"
        ) from error


def _load_into(model: nn.Module, folder: Path) -> nn.Module:
    description = _read_json(folder / _DESCRIPTION)
    _check_checksums(folder)
    load_file, weights = _safetensors().load_file, folder / _WEIGHTS
    with reading(folder, f"this {type(model).__name__}, patched", REMEDY):
        trial = without_data(model)
        apply_description(trial, description)
        with reading(weights, "a whole safetensors file", REMEDY):
            tensors = load_file(_there(weights))
        check_fit(trial, tensors)
        apply_description(model, description)
    model.load_state_dict(tensors, strict=False)  # one of tied tensors stands for all
    return model


def _load_pretrained(folder: Path, kind: type[nn.Module] | None, options: dict[str, Any]) -> Any:
    if (folder / _DESCRIPTION).is_file() and not (folder / _CONFIG).is_file():
        raise ValueError(
            f"{folder} holds a patched model that is not of transformers; pass the unpatched "
            "model, newly built: load_patched(folder, model)"
        )
    config = _read_json(folder / _CONFIG)
    if KEY not in config:
        raise UnreadableFileError(
            f"{folder / _CONFIG} does not say that anything was patched; "
            "from_pretrained of transformers loads it, or save_patched writes another folder"
        )
    _check_checksums(folder)
    kind = _class_of(config) if kind is None else kind
    if not issubclass(kind, nn.Module):
        raise ValueError(f"model must be a class of models, got {kind.__name__}; leave it out")
    with reading(folder, f"a patched {kind.__name__} to load so", REMEDY):
        return kind.from_pretrained(folder, use_safetensors=True, **options)  # type: ignore[attr-defined]


def is_described(config: Any) -> bool:
    """Return whether a config says that layers were patched."""
    return getattr(config, KEY, None) is not None


def load_described(
    load: Callable[..., Any], kind: type[nn.Module], place: Any, *args: Any, **options: Any
) -> Any:
    """Load a model of transformers whose config has a description, by its own method.

    Raises:
        ValueError: The file lacks tensors of a patched layer, which would start at random.
    """
    wants_info = options.pop("output_loading_info", False)
    options["output_loading_info"] = True
    loaded, info = load(_patching_class(kind), place, *args, **options)
    loaded.__class__ = kind
    own = tuple(f"{path}." for path in patched_layers(loaded))
    found = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    fresh = sorted(name for name in found if name.startswith(own))
    if fresh:
        raise ValueError(
            f"{place} lacks tensors of patched layers, which would start at random: "
            f"{', '.join(fresh)}; save the model again with save_patched, or remove {KEY!r} from "
            f"{_CONFIG} to load the model without its patched layers"
        )
    choose_masks(loaded)
    return (loaded, info) if wants_info else loaded


def _class_of(config: dict[str, Any]) -> type[nn.Module]:
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type):
        raise ValueError(f"transformers has no class {name!r}; pass it as model=")
    return kind


def _patching_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass a model class so that its models are patched as their config says before loading.

    A model is made on the ``meta`` device, so sizes that the folder's tensors do not have take no
    memory before they are refused.
    """

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        if not patched_layers(self):  # a constructor may have patched the model itself
            apply_description(self, _named_within(self, getattr(config, KEY)))
            note_in_config(self)

    names = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _named_within(model: Any, description: Any) -> Any:
    """Name the layers as in this model: with the prefix of its body, or without it."""
    names, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    try:
        layers = [dict(entry) for entry in description["layers"]]
        for entry in layers:
            name = entry["name"]
            forms = (name, name.removeprefix(prefix), prefix + name)
            entry["name"] = next((form for form in forms if form in names), name)
    except (KeyError, TypeError, AttributeError, ValueError):  # apply_description says what it is
        return description
    return {**description, "layers": layers}


@contextmanager
def _naming_place(folder: Path) -> Iterator[None]:
    """Name the folder where safetensors cannot write, for instance on a full disk."""
    _safetensors()
    from safetensors import SafetensorError

    try:
        with atomic_files.writing_to(folder):
            yield
    except SafetensorError as error:
        told = f"cannot write {folder}: {error}; free space or choose another place"
        raise OSError(told) from error


def _checked_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in _CHECKED for path in folder.glob(pattern))


def _check_checksums(folder: Path) -> None:
    """Raise where a file is not the one that was saved, if there are checksums."""
    path = folder / _CHECKSUMS
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = {each.name: atomic_files.checksum_of(each) for each in _checked_files(folder)}
    for name in sorted(known.keys() | found.keys()):
        if known.get(name) != found.get(name):
            raise UnreadableFileError(
                f"{folder / name} is not the file that {_CHECKSUMS} is of: it is damaged, missing "
                f"or was changed; copy the folder again, save it with save_patched, or remove "
                f"{_CHECKSUMS} if you meant the change"
            )


def _safetensors() -> Any:
    with needing("patched models are saved as safetensors", "patch"):
        from safetensors import torch as safetensors_torch
    return safetensors_torch


def _read_json(path: Path) -> dict[str, Any]:
    with reading(_there(path), "a whole JSON file", REMEDY):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it holds no object")
        return content


def _there(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"no patched model is at {path.parent}: {path.name} is missing")
    return path
