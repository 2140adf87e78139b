"""Teach ``from_pretrained`` of Hugging Face transformers what this library has saved.

A patched model is built as its config says, and PrimalFormer is known to the Auto classes. The
methods change when transformers is imported, or at once if it is: importing this library loads none
of it.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def teach_transformers() -> None:
    """Change the methods now if transformers is imported, else as soon as it is."""
    missing = {name: change for name, change in _CHANGES.items() if name not in sys.modules}
    for name in _CHANGES.keys() - missing:
        _CHANGES[name](sys.modules[name])
    if missing:
        sys.meta_path.insert(0, _After(missing))


class _After(MetaPathFinder):
    """Run a function on each of some modules after its import."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]):
        self.functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of interest as Python does, and let its loader run the function."""
        function = self.functions.get(name)
        spec = None if function is None else PathFinder.find_spec(name, path, target)
        if function is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        loader.exec_module = exec_module
        return spec


def _read_descriptions(module: Any) -> None:
    """Let models be built as the description of patched layers in their config says."""
    load = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, place: Any, *args: Any, **options: Any) -> Any:
        from primal_attention.patching.saving import is_described, load_described

        if is_described(_config(cls, place, options)):
            return load_described(load, cls, place, *args, **options)
        return load(cls, place, *args, **options)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _config(kind: Any, place: Any, options: dict[str, Any]) -> Any:
    """The config that a model is going to be built with, None where it cannot be read."""
    config = options.get("config")
    if config is not None and not isinstance(config, str):
        return config
    of_hub = {name: options[name] for name in _HUB if name in options}
    try:
        return kind.config_class.from_pretrained(config or place, **of_hub)
    except Exception:  # whatever is wrong, the host is about to say it in its own words
        return None


def _know_primalformer(module: Any) -> None:
    """Register PrimalFormer before the first config is looked up by its name."""
    load = module.AutoConfig.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        from primal_attention.models import hugging_face

        assert hugging_face.PrimalFormerConfig.model_type  # registered by its import
        return load(cls, *args, **options)

    module.AutoConfig.from_pretrained = classmethod(from_pretrained)


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.modeling_utils": _read_descriptions,
    "transformers.models.auto.configuration_auto": _know_primalformer,
}
