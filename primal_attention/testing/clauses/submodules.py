"""The clause about submodules: who hooks, replaces, adapts or offloads one is not ignored.

Reading `self.out_proj.weight` where `self.out_proj(x)` is meant gives the same numbers, until
somebody puts a hook, an adapter or a quantised layer there.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from primal_attention.testing.probes import SEED, Probe, forward
from primal_attention.testing.report import Findings, NotApplicable, deviation, error_line
from primal_attention.testing.subject import Subject

_BOUND = 1e-4
_LEAST_CHANGE = 1e-4
_RANK = 2


class Scaled(nn.Module):
    """A module whose output is scaled, channel by channel; nothing else of it can be reached."""

    def __init__(self, inner: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scaled output."""
        return self.inner(*args, **kwargs) * self.scale


class ScaledAlike(Scaled):
    """A scaled module with the attributes of the inner one, as adapters have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class LowRank(nn.Module):
    """A frozen linear map with an adapter: W x + B A x, with the attributes of the map."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of the map and of its adapter."""
        y: Tensor = self.base(x)
        return y + linear(linear(x, self.down), self.up)

    @property
    def weight(self) -> Tensor:
        """That of the map alone."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """That of the map alone."""
        return self.base.bias


def submodules(subject: Subject) -> Findings:
    """A hook on a submodule, one in its place, an adapter, and offloading all act.

    Offloading may be refused with an error. A submodule without a forward pass, or one that has
    parameters or buffers of which nothing depends, is left out.
    """
    findings = subject.findings("a hook, a wrapper, an adapter and offloading act on")
    calls = list(_calls(subject))
    want = _outputs(subject.copy(), calls)
    named, refused = [], None
    for name, module in subject.copy().named_modules():
        if name and _can_be_called(module):
            if isinstance(module, nn.Linear):
                acts = _observe_linear(findings, subject, calls, name, want)
                refused = refused or acts.refused
            else:
                acts = _observe_other(findings, subject, calls, name, want)
            named += [name] if acts.seen else []
    if not named:
        raise NotApplicable("no submodule with a forward pass that gives a tensor")
    findings.detail += f" {', '.join(named)}"
    if refused is not None:
        findings.detail += f"; offloading is refused ({refused})"
    return findings


class _Acts(NamedTuple):
    """How a submodule takes part in the outputs."""

    seen: bool
    refused: str | None = None


class _Call(NamedTuple):
    """One way to use the module: it may take another path to its outputs in each."""

    label: str
    run: Callable[[nn.Module], Tensor]


def _calls(subject: Subject) -> Iterator[_Call]:
    x = subject.tokens(2, 11)
    mask = subject.prefix_mask((11, 7))

    def without_gradients(layer: nn.Module) -> Tensor:
        with torch.no_grad():
            return forward(layer, x)

    yield _Call("without gradients", without_gradients)
    yield _Call("with gradients", lambda layer: forward(layer, x).detach())
    yield _Call("with a mask", lambda layer: forward(layer, x, token_mask=mask).detach())
    if subject.takes_context:
        context = subject.tokens(2, 9, seed=1)
        yield _Call("with a context", lambda layer: forward(layer, x, context=context).detach())
    if subject.causal and hasattr(subject.copy(), "prefill"):

        def in_chunks(layer: Any) -> Tensor:
            first, state = layer.prefill(x[:, :5])
            second, _ = layer.prefill(x[:, 5:], state)
            return torch.cat([first, second], dim=1).detach()

        yield _Call("in chunks", in_chunks)


def _outputs(layer: nn.Module, calls: list[_Call]) -> list[Tensor]:
    return [call.run(layer) for call in calls]


def _can_be_called(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _observe_linear(
    findings: Findings, subject: Subject, calls: list[_Call], name: str, plain: list[Tensor]
) -> _Acts:
    """Compare everything that acts on a linear map with the map with other parameters."""
    changed = subject.copy()
    scale = _scale(_linear(changed, name).out_features, changed)
    with torch.no_grad():
        for parameter in _linear(changed, name).parameters():
            parameter.copy_(_scaled(parameter, scale))
    want = _outputs(changed, calls)
    if not any(deviation(w, p) >= _LEAST_CHANGE for w, p in zip(want, plain, strict=True)):
        return _Acts(seen=False)
    hooked, wrapped, alike = subject.copy(), subject.copy(), subject.copy()
    hooked.get_submodule(name).register_forward_hook(lambda module, args, y: y * scale)
    _replace(wrapped, name, lambda module: Scaled(module, scale))
    _replace(alike, name, lambda module: ScaledAlike(module, scale))
    ways = {
        "a hook on": hooked,
        "a module around": wrapped,
        "one with its attributes around": alike,
    }
    for way, layer in ways.items():
        for call, w in zip(calls, want, strict=True):
            _compare(findings, f"{way} {name}", call, layer, w)
    _observe_adapter(findings, subject, calls, name)
    return _Acts(True, _observe_offloading(findings, subject, calls, name, want))


def _observe_adapter(findings: Findings, subject: Subject, calls: list[_Call], name: str) -> None:
    """An adapter acts and is trained as its merged map says."""
    adapted, merged = subject.copy(), subject.copy()
    into = _linear(merged, name)
    generator = torch.Generator().manual_seed(SEED)
    down, up = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(into.weight) * 0.3
        for shape in ((_RANK, into.in_features), (into.out_features, _RANK))
    )
    _replace(adapted, name, lambda module: LowRank(module, down.clone(), up.clone()))
    with torch.no_grad():
        into.weight.add_(up @ down)
    for call in calls:
        _compare(findings, f"an adapter of {name}", call, adapted, call.run(merged))
    if findings.broken():
        return
    x, cotangent = subject.tokens(2, 11), subject.tokens(2, 11, seed=1)
    got, want = (Probe(layer, x, cotangent).run() for layer in (adapted, merged))
    d_weight = want.d_parameters[f"{name}.weight"]
    for part, d_want in (("down", up.mT @ d_weight), ("up", d_weight @ down.mT)):
        d_got = got.d_parameters[f"{name}.{part}"]
        findings.close(f"gradient of an adapter of {name}", d_got, d_want, _BOUND)


def _compare(findings: Findings, way: str, call: _Call, layer: nn.Module, want: Tensor) -> None:
    """Record how far a changed module is from what it should give; an error is infinitely far."""
    try:
        findings.close(f"{way}, {call.label}", call.run(layer), want, _BOUND)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        findings.at_most(f"{way}, {call.label} ({error_line(error)})", math.inf, _BOUND)


def _observe_offloading(
    findings: Findings, subject: Subject, calls: list[_Call], name: str, want: list[Tensor]
) -> str | None:
    """The weights are put back, scaled, for the call of the map alone; why not, where refused."""
    layer, refused = subject.copy(), None
    target = _linear(layer, name)
    scale = _scale(target.out_features, target)
    held = {
        key: nn.Parameter(_scaled(p.detach(), scale))
        for key, p in target.named_parameters(recurse=False)
    }

    def put_back(module: nn.Module, args: Any) -> None:
        for key, parameter in held.items():
            module.register_parameter(key, parameter)

    def take_away(module: nn.Module, args: Any, output: Any) -> None:
        for key, parameter in held.items():
            module.register_parameter(key, nn.Parameter(parameter.detach().to("meta")))

    take_away(target, (), None)
    target.register_forward_pre_hook(put_back)
    target.register_forward_hook(take_away)
    for call, w in zip(calls, want, strict=True):
        try:
            got = call.run(layer)
        except (RuntimeError, ValueError, TypeError) as error:
            refused = refused or error_line(error)
            continue
        findings.close(f"offloading of {name}, {call.label}", got, w, _BOUND)
    return refused


def _observe_other(
    findings: Findings, subject: Subject, calls: list[_Call], name: str, plain: list[Tensor]
) -> _Acts:
    """A hook on a module that is no linear map does what a module around it does."""
    seen: list[Any] = []
    spied = subject.copy()
    spied.get_submodule(name).register_forward_hook(lambda module, args, y: seen.append(y))
    _outputs(spied, calls)
    if any(not isinstance(y, Tensor) or y.ndim == 0 for y in seen):
        return _Acts(seen=False)
    if not seen:
        return _Acts(_observe_unused(findings, subject, calls, name, plain))
    hooked, wrapped = subject.copy(), subject.copy()
    scale = _scale(seen[0].shape[-1], seen[0])
    hooked.get_submodule(name).register_forward_hook(lambda module, args, y: y * scale)
    _replace(wrapped, name, lambda module: ScaledAlike(module, scale))
    for number, (call, p) in enumerate(zip(calls, plain, strict=True)):
        seen.clear()
        call.run(spied)
        if seen:
            got, want = call.run(hooked), call.run(wrapped)
            findings.close(f"a hook on {name}, {call.label}", got, want, _BOUND)
            change = deviation(got, p)
            what = f"change of the output by a hook on {name}, {call.label}"
            findings.at_least(what, change, _LEAST_CHANGE)
        else:
            _observe_unused(findings, subject, [call], name, plain[number : number + 1])
    return _Acts(seen=True)


def _observe_unused(
    findings: Findings, subject: Subject, calls: list[_Call], name: str, plain: list[Tensor]
) -> bool:
    """Return whether outputs use the parameters of a module that is not called."""
    layer, passed_by = subject.copy(), False
    with torch.no_grad():
        for value in layer.get_submodule(name).state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                value.mul_(_scale(value.shape[-1], value))
    for call, p in zip(calls, plain, strict=True):
        if deviation(call.run(layer), p) >= _LEAST_CHANGE:
            findings.at_least(f"calls of {name}, {call.label}", 0.0, 1.0)
            passed_by = True
    return passed_by


def _scaled(parameter: Tensor, scale: Tensor) -> Tensor:
    """Scale the rows of a weight, or the entries of a bias."""
    return parameter * scale.view(-1, *[1] * (parameter.ndim - 1))


def _replace(layer: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> None:
    parent, _, child = name.rpartition(".")
    owner = layer.get_submodule(parent)
    owner.register_module(child, make(layer.get_submodule(name)))


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _scale(channels: int, like: nn.Module | Tensor) -> Tensor:
    """A factor for each channel: of either sign, since maps may not see the size of a vector."""
    tensor = like if isinstance(like, Tensor) else next(like.parameters())
    generator = torch.Generator().manual_seed(SEED)
    size = 0.5 + torch.rand(channels, generator=generator, dtype=torch.float32)
    sign = torch.randint(2, (channels,), generator=generator) * 2 - 1
    return (size * sign).to(tensor)
