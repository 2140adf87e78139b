"""Run a model over data and capture what its attention layers do, batch by batch.

Layers of this library are captured where they attend. For softmax attention of a foreign model a
`SoftmaxAttention` with the host's projections, positions and masks stands beside the host and is
called with the same arguments; the host itself is not changed.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from primal_attention.analysis.captured import CapturedAttention, CapturedPrimal
from primal_attention.analysis.matrices import HeadMatrices
from primal_attention.attention import ATTENTIONS
from primal_attention.attention.base.qkv import QKVAttention
from primal_attention.attention.primal import PrimalAttention
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.patch import build_layer, resolve_options
from primal_attention.patching.sites import Site, find_sites, patched_layers

Data = Tensor | Mapping[str, Any] | Iterable[Any]
"""One batch (a tensor, a mapping of arguments, a tuple of them), or a list or iterator of such."""
Captured = CapturedAttention | CapturedPrimal
Hear = Callable[[Captured], None]
AnalysableAttention = QKVAttention | PrimalAttention
_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer of a model."""

    name: str  # its path
    mechanism: AnalysableAttention  # of this library; the one that stands beside a host
    prepare: Callable[[ExitStack], None]  # hooks of the model that calls it

    @property
    def attention(self) -> str:
        """The name of its mechanism in the registry."""
        names = (name for name, kind in ATTENTIONS.items() if type(self.mechanism) is kind)
        return next(names, type(self.mechanism).__name__)

    @property
    def head_dim(self) -> int:
        """C."""
        return self.mechanism.head_dim

    def listen(self, heard: list[tuple[Self, Captured]], stack: ExitStack) -> None:
        """Append every call to a list until the stack is closed."""

        def hear(captured: Captured) -> None:
            heard.append((self, captured))

        self.prepare(stack)
        if isinstance(self.mechanism, PrimalAttention):
            _listen_to_primal(self.mechanism, hear, stack)
        else:
            _listen_to_attend(self.mechanism, hear, stack)


class FoundLayers(NamedTuple):
    """The layers of a model that can be analysed, and why the others cannot."""

    found: list[AttentionLayer]
    skipped: dict[str, str]


def attention_matrices(model: nn.Module, data: Data) -> Iterator[tuple[str, HeadMatrices]]:
    """Yield the name of each layer and its attention or kernel matrices, sequence by sequence."""
    for layer, captured in capture(model, data):
        for heads in captured.matrices():
            yield layer.name, heads


def capture(
    model: nn.Module, data: Data, layers: list[AttentionLayer] | None = None
) -> Iterator[tuple[AttentionLayer, Captured]]:
    """Capture all calls of the layers, in evaluation mode and without gradients.

    The model is restored after the last one.
    """
    layers = find_layers(model).found if layers is None else layers
    training = [module for module in model.modules() if module.training]
    heard: list[tuple[AttentionLayer, Captured]] = []
    batches = _batches(data)
    with ExitStack() as stack:
        stack.callback(_train, training)
        model.eval()
        for layer in layers:
            layer.listen(heard, stack)
        for args, kwargs in batches:
            heard.clear()
            with torch.no_grad():
                model(*args, **kwargs)
            yield from tuple(heard)  # the model may be called in between


def _train(modules: list[nn.Module]) -> None:
    for module in modules:
        module.training = True


def _batches(data: Data) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of each call of the model."""
    one = isinstance(data, Tensor | Mapping | tuple) or not isinstance(data, Iterable)
    for batch in [data] if one else data:
        if isinstance(batch, Mapping):
            yield (), dict(batch)
        elif isinstance(batch, Tensor | tuple | list):
            yield (batch,) if isinstance(batch, Tensor) else tuple(batch), {}
        else:
            raise ValueError(
                "data must be a batch or an iterable of batches (tensors, mappings of arguments, "
                f"or tuples of them), got {type(batch).__name__}"
            )


def find_layers(model: nn.Module) -> FoundLayers:
    """Find every attention layer in the order of the model; raise where none can be analysed."""
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
    return FoundLayers(sorted(found, key=lambda layer: place.get(layer.name, -1)), skipped)


def _own_layers(model: nn.Module) -> tuple[list[AttentionLayer], dict[str, str]]:
    found, skipped = [], {}
    patched = {layer.mechanism: (name, layer) for name, layer in patched_layers(model).items()}
    for path, module in model.named_modules():
        if isinstance(module, QKVAttention | PrimalAttention):
            name, around = patched.get(module, (path or type(module).__name__, None))
            if reason := module.mechanism.why_no_matrix(module):
                skipped[name] = reason
            else:
                found.append(AttentionLayer(name, module, partial(_without_cache, around)))
    return found, skipped


def _beside(site: Site) -> AttentionLayer:
    """The attention of a foreign model: a layer beside it, called with the same arguments."""
    parts = site.read()
    beside = build_layer(site, parts, "softmax", resolve_options("softmax", {}, parts)).eval()
    beside.shows_weights = False  # type: ignore[assignment]
    assert site.host is not None
    settings = site.host.settings(site.module, site.ancestors)  # so that the host calls attention
    signature = inspect.signature(site.module.forward)

    @torch.no_grad()
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        named.pop("past_key_values", None)  # there is nothing before the tokens of a full pass
        beside(**named)

    def prepare(stack: ExitStack) -> None:
        stack.enter_context(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        for owner, attribute, new in settings:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, new)

    return AttentionLayer(site.name, beside.mechanism, prepare)


def _without_cache(layer: PatchedAttention | None, stack: ExitStack) -> None:
    """Give a layer whole sequences: with a cache it would continue a state, unheard."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: each for name, each in kwargs.items() if name != "past_key_values"}

    if layer is not None:
        stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))


def _listen_to_primal(layer: PrimalAttention, hear: Hear, stack: ExitStack) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear(CapturedPrimal.of(layer, *args, **kwargs))

    stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))


def _listen_to_attend(layer: QKVAttention, hear: Hear, stack: ExitStack) -> None:
    exact = _in_float64(layer)
    crossing = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal crossing
        crossing = len(args) > 1 or kwargs.get("context") is not None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        tensors = q.detach(), k.detach(), v.detach(), mask, source_mask
        hear(CapturedAttention(exact, *tensors, crossing))
        return type(layer).attend(layer, q, k, v, mask, source_mask)

    stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
    layer.attend = attend  # type: ignore[method-assign]
    stack.callback(delattr, layer, "attend")


def _in_float64(module: _M) -> _M:
    """Copy in float64 and evaluation mode; what is no tensor or module is shared."""
    kept = {id(value): value for name, value in vars(module).items() if not name.startswith("_")}
    return deepcopy(module, kept).double().eval()
