"""The clause about submodules: who hooks, replaces, adapts or offloads one is not ignored.

Reading `self.out_proj.weight` where `self.out_proj(x)` is meant gives the same numbers, until
somebody puts a hook, an adapter or a quantised layer there.
"""

import math
from collections.abc import Callable, Iterator, Mapping
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


class LowRank(nn.Module):
    """The change that an adapter makes to a linear map: B A x + c, without c where it has none."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)

        def noise(*shape: int) -> nn.Parameter:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            return nn.Parameter(0.3 * drawn.to(base.weight))

        self.down, self.up = noise(_RANK, base.in_features), noise(base.out_features, _RANK)
        self.offset = None if base.bias is None else noise(base.out_features)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the output of the adapter to that of the map."""
        return y + linear(linear(x, self.down), self.up, self.offset)

    @torch.no_grad()
    def merge_into(self, base: nn.Linear) -> None:
        """Make the change to the parameters of the map."""
        base.weight.add_(self.up @ self.down)
        if self.offset is not None:
            base.bias.add_(self.offset)


class Scaling(nn.Module):
    """A change of any output: channels scaled, by either sign, as maps may not see a size."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        size = 0.5 + torch.rand(like.shape[-1], generator=generator, dtype=torch.float32)
        sign = torch.randint(2, size.shape, generator=generator) * 2 - 1
        self.scale = (size * sign).to(like)

    def forward(self, y: Tensor, *args: Any) -> Tensor:
        """Scale the output of the module."""
        return y * self.scale


class Around(nn.Module):
    """A module whose output is changed; nothing else of it can be reached."""

    def __init__(self, inner: nn.Module, change: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.change = change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the changed output."""
        return self.change(self.inner(*args, **kwargs), *args)


class AroundAlike(Around):
    """A module around another with the attributes of the inner one, as adapters have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _Call(NamedTuple):
    """One way to use the module: it may take another path to its outputs in each."""

    label: str
    run: Callable[[nn.Module], Tensor]


def submodules(subject: Subject) -> Findings:
    """A hook on a submodule, one in its place, an adapter, and offloading all act.

    Offloading may be refused with an error. A submodule without a forward pass, or one that has
    parameters or buffers of which nothing depends, is left out.
    """
    check = _Check(subject)
    named = []
    for name, module in subject.copy().named_modules():
        if name and getattr(type(module).forward, "__name__", "") != "_forward_unimplemented":
            observe = check.linear if isinstance(module, nn.Linear) else check.other
            named += [name] if observe(name) else []
    if not named:
        raise NotApplicable("no submodule with a forward pass that gives a tensor")
    check.findings.detail += f" {', '.join(named)}"
    if check.refused is not None:
        check.findings.detail += f"; offloading is refused ({check.refused})"
    return check.findings


class _Check:
    """Findings about one submodule after the other; each method returns whether it acts."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.findings = subject.findings("a hook, a wrapper, an adapter and offloading act on")
        self.calls = list(_calls(subject))
        self.plain = self.outputs(subject.copy())
        self.refused: str | None = None  # why offloading is refused

    def outputs(self, layer: nn.Module) -> list[Tensor]:
        """Return what each call gives."""
        return [call.run(layer) for call in self.calls]

    def hooked(self, name: str, change: nn.Module) -> nn.Module:
        """Change the output of a submodule by a hook."""
        layer = self.subject.copy()
        module = layer.get_submodule(name)
        module.register_forward_hook(lambda module, args, y: change(y, *args))
        return layer

    def replaced(self, name: str, kind: type[Around], change: nn.Module) -> nn.Module:
        """Change the output of a submodule by a module in its place."""
        layer = self.subject.copy()
        layer.set_submodule(name, kind(layer.get_submodule(name), change))
        return layer

    def linear(self, name: str) -> bool:
        """Compare everything that acts on a linear map with the map with other parameters."""
        merged = self.subject.copy()
        base: Any = merged.get_submodule(name)
        change = LowRank(base)
        change.merge_into(base)
        want = self.outputs(merged)
        pairs = zip(want, self.plain, strict=True)
        if not any(deviation(w, p) >= _LEAST_CHANGE for w, p in pairs):
            return False
        adapted = self.replaced(name, AroundAlike, change)
        ways = {
            "a hook on": self.hooked(name, change),
            "a module around": self.replaced(name, Around, change),
            "an adapter of": adapted,
        }
        for way, layer in ways.items():
            for call, w in zip(self.calls, want, strict=True):
                self.compare(f"{way} {name}, {call.label}", call, layer, w)
        if not self.findings.broken():
            self.compare_training(name, adapted, merged)
        self.offloading(name, dict(base.named_parameters(recurse=False)), want)
        return True

    def compare(self, what: str, call: _Call, layer: nn.Module, want: Tensor) -> None:
        """Hold a changed module to what it should give; an error is infinitely far."""
        try:
            self.findings.close(what, call.run(layer), want, _BOUND)
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            self.findings.at_most(f"{what} ({error_line(error)})", math.inf, _BOUND)

    def compare_training(self, name: str, adapted: nn.Module, merged: nn.Module) -> None:
        """Hold the gradients of an adapter to those of the map that it is merged into."""
        x, cotangent = self.subject.tokens(2, 11), self.subject.tokens(2, 11, seed=1)
        got, want = (Probe(layer, x, cotangent).run().d_parameters for layer in (adapted, merged))
        change: Any = adapted.get_submodule(f"{name}.change")
        d_weight = want[f"{name}.weight"]
        wanted = {"down": change.up.mT @ d_weight, "up": d_weight @ change.down.mT}
        for part, d_want in wanted.items():
            what = f"gradient of an adapter of {name}"
            self.findings.close(what, got[f"{name}.change.{part}"], d_want, _BOUND)

    def offloading(self, name: str, held: Mapping[str, nn.Parameter], want: list[Tensor]) -> None:
        """Put other weights back for the call of the map alone; note why, where it is refused."""
        layer = self.subject.copy()
        target = layer.get_submodule(name)
        away = {key: nn.Parameter(p.detach().to("meta")) for key, p in held.items()}

        def put(parameters: Mapping[str, nn.Parameter]) -> None:
            for key, parameter in parameters.items():
                target.register_parameter(key, parameter)

        put(away)
        target.register_forward_pre_hook(lambda module, args: put(held))
        target.register_forward_hook(lambda module, args, y: put(away))
        for call, w in zip(self.calls, want, strict=True):
            try:
                got = call.run(layer)
            except (RuntimeError, ValueError, TypeError) as error:
                self.refused = self.refused or error_line(error)
                continue
            self.findings.close(f"offloading of {name}, {call.label}", got, w, _BOUND)

    def other(self, name: str) -> bool:
        """A hook on a module that is no linear map does what a module around it does."""
        seen: list[Any] = []
        spied = self.subject.copy()
        spied.get_submodule(name).register_forward_hook(lambda module, args, y: seen.append(y))
        self.outputs(spied)
        if any(not isinstance(y, Tensor) or y.ndim == 0 for y in seen):
            return False
        if not seen:
            passed = [self.passes_by(name, *each) for each in self.calls_and_outputs()]
            return any(passed)
        change = Scaling(seen[0])
        hooked = self.hooked(name, change)
        wrapped = self.replaced(name, AroundAlike, change)
        for call, plain in self.calls_and_outputs():
            seen.clear()
            call.run(spied)
            if not seen:
                self.passes_by(name, call, plain)
                continue
            got, what = call.run(hooked), f"a hook on {name}, {call.label}"
            self.findings.close(what, got, call.run(wrapped), _BOUND)
            what = f"change of the output by {what}"
            self.findings.at_least(what, deviation(got, plain), _LEAST_CHANGE)
        return True

    def calls_and_outputs(self) -> Iterator[tuple[_Call, Tensor]]:
        """Pair each call with what the unchanged module gives."""
        return zip(self.calls, self.plain, strict=True)

    def passes_by(self, name: str, call: _Call, plain: Tensor) -> bool:
        """Return whether an output uses the parameters of a module that is not called."""
        layer = self.subject.copy()
        with torch.no_grad():
            for value in layer.get_submodule(name).state_dict().values():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                    value.mul_(Scaling(value).scale)
        if deviation(call.run(layer), plain) < _LEAST_CHANGE:
            return False
        self.findings.at_least(f"calls of {name}, {call.label}", 0.0, 1.0)
        return True


def _calls(subject: Subject) -> Iterator[_Call]:
    x = subject.tokens(2, 11)
    mask = subject.prefix_mask((11, 7))
    yield _Call("without gradients", torch.no_grad()(lambda layer: forward(layer, x)))
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
