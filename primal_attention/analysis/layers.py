"""The attention layers of a model that can be looked into, and how to listen to them.

Layers of this library are heard where they attend. For softmax attention of a foreign model a
`SoftmaxAttention` with the host's projections, positions and masks stands beside the host and is
called with what the host is called with; the host itself is left alone.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from primal_attention.analysis.primal_runs import PrimalRun
from primal_attention.analysis.runs import AttendedRun
from primal_attention.attention import ATTENTIONS
from primal_attention.attention.base.qkv import QKVAttention
from primal_attention.attention.primal import PrimalAttention
from primal_attention.patching.adapter import Change, PatchedAttention
from primal_attention.patching.building import build_layer, resolve_options
from primal_attention.patching.hosts.collector import beside_the_host
from primal_attention.patching.sites import Site, find_sites, patched_layers

Run = AttendedRun | PrimalRun
Hear = Callable[[Run], None]
Mechanism = QKVAttention | PrimalAttention
_M = TypeVar("_M", bound=nn.Module)


class Hosted(NamedTuple):
    """The attention of a foreign model and what stands beside it."""

    module: nn.Module
    beside: nn.Module
    settings: list[Change]  # what must change in the host for its attention to be called

    def call_along(self, stack: ExitStack) -> None:
        """Call what stands beside with all that the host is called with, by the same names."""
        signature = inspect.signature(self.module.forward)

        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = signature.bind(*args, **kwargs).arguments
            named = {**bound, **bound.pop("kwargs", {})}
            named.pop("past_key_values", None)  # there is nothing before the tokens of a full pass
            with beside_the_host():
                self.beside(**named)

        stack.callback(self.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for owner, attribute, new in self.settings:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, new)


@dataclass(frozen=True)
class Layer:
    """An attention layer of a model."""

    name: str  # its path
    mechanism: Mechanism  # of this library; the one that stands beside a host
    hosted: Hosted | None = None  # where the attention is that of a foreign model
    patched: PatchedAttention | None = None  # where it was patched into one

    @property
    def attention(self) -> str:
        """The name of its mechanism in the registry."""
        names = (name for name, kind in ATTENTIONS.items() if type(self.mechanism) is kind)
        return next(names, type(self.mechanism).__name__)

    @property
    def head_dim(self) -> int:
        """C."""
        return self.mechanism.head_dim

    def listen(self, hear: Hear, stack: ExitStack) -> None:
        """Have every pass told, until the stack is closed."""
        if self.patched is not None:
            _without_cache(self.patched, stack)
        if isinstance(self.mechanism, PrimalAttention):
            _listen_to_primal(self.mechanism, hear, stack)
            return
        _listen_to_attend(self.mechanism, hear, stack)
        if self.hosted is not None:
            self.hosted.call_along(stack)


class Layers(NamedTuple):
    """Those of a model that can be looked into, and why the others cannot."""

    found: list[Layer]
    skipped: dict[str, str]


def find_layers(model: nn.Module) -> Layers:
    """Every attention layer in the order of the model; an error where none can be looked into."""
    found, skipped = _own_layers(model)
    try:
        sites = find_sites(model)
    except ValueError:
        if not found and not skipped:
            raise
        sites = []
    for site in sites:
        if site.host is not None:
            try:
                found.append(_beside(site))
            except ValueError as error:
                skipped[site.name] = str(error)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"model: no attention of {type(model).__name__} is known: {reasons}")
    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return Layers(sorted(found, key=lambda layer: place.get(layer.name, -1)), skipped)


def _own_layers(model: nn.Module) -> tuple[list[Layer], dict[str, str]]:
    found, skipped = [], {}
    patched = {layer.mechanism: (name, layer) for name, layer in patched_layers(model).items()}
    for path, module in model.named_modules():
        if isinstance(module, QKVAttention | PrimalAttention):
            name, around = patched.get(module, (path or type(module).__name__, None))
            if reason := module.mechanism.why_no_matrix(module):
                skipped[name] = reason
            else:
                found.append(Layer(name, module, patched=around))
    return found, skipped


def _beside(site: Site) -> Layer:
    parts = site.read()
    adapter = build_layer(site, parts, "softmax", resolve_options("softmax", {}, parts)).eval()
    assert site.host is not None
    hosted = Hosted(site.module, adapter, site.host.settings(site.module, site.ancestors))
    return Layer(site.name, adapter.mechanism, hosted)


def _without_cache(layer: PatchedAttention, stack: ExitStack) -> None:
    """Have a layer see whole sequences: with a cache it would go on from a state, unheard."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: each for name, each in kwargs.items() if name != "past_key_values"}

    stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _listen_to_primal(layer: PrimalAttention, hear: Hear, stack: ExitStack) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear(PrimalRun.of(layer, *args, **kwargs))

    stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _listen_to_attend(layer: QKVAttention, hear: Hear, stack: ExitStack) -> None:
    exact = _in_float64(layer)
    crossing = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal crossing
        crossing = len(args) > 1 or kwargs.get("context") is not None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        parts = q.detach(), k.detach(), v.detach(), mask, source_mask
        hear(AttendedRun(exact, *parts, crossing))
        return type(layer).attend(layer, q, k, v, mask, source_mask)

    stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
    layer.attend = attend  # type: ignore[method-assign]
    stack.callback(delattr, layer, "attend")


def _in_float64(module: _M) -> _M:
    """A copy in float64 and evaluation mode; what is no tensor or module is shared."""
    kept = {id(value): value for name, value in vars(module).items() if not name.startswith("_")}
    return deepcopy(module, kept).double().eval()
