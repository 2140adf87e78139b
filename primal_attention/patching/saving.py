"""Patched models on the disk: safetensors and JSON, so reading one runs no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from primal_attention.patching.description import (
    KEY,
    apply_description,
    describe,
    note_in_config,
)
from primal_attention.patching.padding_only import choose_masks
from primal_attention.whole_files import replacing, write_text

_WEIGHTS, _DESCRIPTION = "model.safetensors", f"{KEY}.json"


def save_patched(model: nn.Module, folder: str | Path) -> None:
    """Write a patched model into a folder.

    A model of transformers is saved by its own ``save_pretrained``, with what was patched in its
    ``config.json``; any other as ``model.safetensors`` and ``primal_attention.json``.
    """
    description = describe(model)
    if not description["layers"]:
        raise ValueError(f"{type(model).__name__} has no patched layer to save")
    try:
        text = json.dumps(description, indent=2)
    except TypeError as error:
        raise ValueError(f"an option of a patched layer is no JSON value: {error}") from error
    folder = Path(folder)
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        note_in_config(model)
        save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(model, folder / _WEIGHTS)
    write_text(folder / _DESCRIPTION, text)


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
    load = _safetensors().load_model
    apply_description(model, description)
    load(model, folder / _WEIGHTS)
    return model


def _load_pretrained(folder: Path, kind: type[nn.Module] | None, options: dict[str, Any]) -> Any:
    config = _read_json(folder / "config.json")
    if KEY not in config:
        raise ValueError(f"{folder / 'config.json'} does not say that anything was patched")
    kind = _class_of(config) if kind is None else kind
    if not issubclass(kind, nn.Module):
        raise ValueError(f"model must be a class of models, got {kind.__name__}; leave it out")
    patched_kind = _patching_class(kind)
    loaded: Any = patched_kind.from_pretrained(folder, use_safetensors=True, **options)  # type: ignore[attr-defined]
    loaded.__class__ = kind
    choose_masks(loaded)
    return loaded


def _class_of(config: dict[str, Any]) -> type[nn.Module]:
    import transformers

    (name,) = config.get("architectures") or [None]
    kind = getattr(transformers, name or "", None)
    if kind is None:
        raise ValueError(f"transformers has no class {name!r}; pass it as model=")
    found: type[nn.Module] = kind
    return found


def _patching_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, but its models are patched as their config says before weights arrive."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        apply_description(self, getattr(config, KEY))

    names = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _save_tensors(model: nn.Module, path: Path) -> None:
    with replacing(path) as temporary:
        _safetensors().save_model(model, str(temporary))


def _safetensors() -> Any:
    try:
        from safetensors import torch as safetensors_torch
    except ImportError as error:
        message = "patched models are saved as safetensors: pip install 'primal-attention[patch]'"
        raise ImportError(message) from error
    return safetensors_torch


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no patched model is at {path.parent}: {path.name} is missing")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: got {content!r}")
    return content
