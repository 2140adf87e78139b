"""Clauses about derivatives: they are those of the outputs, in whatever way they are asked for.

All of them look at one number F, made of the outputs, as a function of the inputs and of all
parameters. To make it the module is called twice, and the second call gets what the first gave.
So its inputs are no leaves of the graph: they are computed from one another and from the
parameters, as in a network, and a gradient that takes such a path twice is a wrong one.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from primal_attention.testing.probes import SEED, forward, gradients_of
from primal_attention.testing.report import Findings, error_line
from primal_attention.testing.subject import Subject

Variables = dict[str, Tensor]
"""The inputs and the parameters, by name."""

_BOUND = 1e-6
_SAME_BOUND = 1e-9  # two computations of the same derivative in float64
_STEPS = (1e-5, 1e-4, 1e-6)  # the others where the first is rounded, or steps over a kink
_WEIGHTS = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}  # differences of fourth order
_N = 7


class _Twice(nn.Module):
    """Two calls of a layer, of which the second gets what the first gave."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, context: Tensor | None = None, **masks: Tensor) -> Tensor:
        if context is None:
            first = forward(self.layer, x, **masks)
            return torch.cat([first, forward(self.layer, x + first, **masks)])
        first = forward(self.layer, x, context=context, **masks)
        second = forward(self.layer, x + first, context=context + first, **masks)
        return torch.cat([first, second])


class _InChunks(nn.Module):
    """A causal layer that goes on from the state after some tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.layer.prefill(x[:, : _N // 2])
        second, _ = self.layer.prefill(x[:, _N // 2 :] + first.mean(1, keepdim=True), state)
        return torch.cat([first, second], dim=1)


class _Case(NamedTuple):
    """A function F, and where it is looked at."""

    label: str
    calls: nn.Module
    inputs: Variables
    masks: Mapping[str, Tensor]

    def variables(self) -> Variables:
        """The inputs, and the parameters that are trained."""
        trained = {name: p for name, p in self.calls.named_parameters() if p.requires_grad}
        return {name: tensor.detach().clone() for name, tensor in (self.inputs | trained).items()}

    def value(self, variables: Variables) -> Tensor:
        """F, for the given values of some or all of the variables."""
        inputs = self.inputs | {name: variables[name] for name in self.inputs if name in variables}
        parameters = {name: t for name, t in variables.items() if name not in self.inputs}
        arguments = {**inputs, **self.masks}
        x = arguments.pop("x")
        output = torch.func.functional_call(self.calls, parameters, (x,), arguments)
        value: Tensor = (output * _noise_like(output, "cotangent")).sum()
        return value

    def gradients(self, variables: Variables, *, create_graph: bool = False) -> Variables:
        """The gradients of F, by reverse mode."""
        leaves = {name: value.detach().requires_grad_() for name, value in variables.items()}
        return gradients_of(self.value(leaves), leaves, create_graph=create_graph)


def gradients(subject: Subject) -> Findings:
    """In float64, the slope along each input and parameter is that of central differences."""
    findings = Findings("the gradient of each input and parameter is that of central differences")
    for case in _cases(subject):
        variables = case.variables()
        got = case.gradients(variables)
        for name, variable in variables.items():
            direction = _noise_like(variable, name)
            slope = (got[name] * direction).sum()
            what = f"{case.label}: slope along {_shown(name)}"
            _close_to_difference(findings, what, slope, case.value, variables, {name: direction})
    return findings


def gradient_graphs(subject: Subject) -> Findings:
    """With `create_graph=True` gradients stay the same, and can be differentiated or refuse it.

    Second derivatives are those of central differences, and finite at zero vectors: padding,
    tokens that are zero, no bias.
    """
    findings = Findings("with create_graph=True the gradients are the same")
    refusals = []
    for case in _cases(subject):
        variables = case.variables()
        want = case.gradients(variables)
        got = case.gradients(variables, create_graph=True)
        for name, gradient in want.items():
            what = f"{case.label}: gradient of {_shown(name)} with create_graph=True"
            findings.at_most(what, _relative(got[name], gradient), _SAME_BOUND)
        refusals.append(_observe_second(findings, case, at_zero=False))
    refusals += [_observe_second(findings, case, at_zero=True) for case in _zero_cases(subject)]
    refused = next((each for each in refusals if each is not None), None)
    findings.detail += (
        "; second derivatives are right, and finite at zero vectors"
        if refused is None
        else f"; second derivatives are refused ({refused})"
    )
    return findings


def forward_mode(subject: Subject) -> Findings:
    """Forward-mode derivatives are those of reverse mode, or are refused with an error."""
    findings = Findings("forward-mode derivatives are those of reverse mode")
    refusals = []
    for case in _cases(subject):
        variables = case.variables()
        reverse = case.gradients(variables)
        directions = {name: _noise_like(value, name) for name, value in variables.items()}
        slopes = {name: (reverse[name] * d).sum() for name, d in directions.items()}
        for label, names in (("the inputs", list(case.inputs)), ("everything", list(variables))):
            some = {name: variables[name] for name in names}
            along = {name: directions[name] for name in names}
            want = torch.stack([slopes[name] for name in names]).sum()
            for way, derivative in (("jvp", _by_jvp), ("forward_ad", _by_dual_numbers)):
                what = f"{case.label}: {way} along {label}"
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        got = derivative(case.value, some, along)
                except Exception as error:
                    refusals.append(error_line(error))
                    continue
                findings.at_most(what, _relative(got, want), _SAME_BOUND)
    if refusals:
        few = "some" if findings.observations else "all"
        findings.detail += f"; {few} of them are refused ({refusals[0]})"
    if not findings.observations:
        findings.at_most("derivatives that are refused", 0.0, 0.0)
    return findings


def _cases(subject: Subject) -> Iterator[_Case]:
    """Masked and not, with a context and in chunks where the module has these."""
    layer = subject.copy(torch.float64)
    x = subject.tokens(3, _N).double()
    holes = subject.prefix_mask((_N, 5, 1))
    holes[0, 2] = holes[1, 0] = False
    inputs = {"x": x}
    calls = _Twice(layer)
    yield _Case("without a mask", calls, inputs, {})
    yield _Case("with a mask", calls, inputs, {"token_mask": holes})
    if subject.takes_context:
        pair = inputs | {"context": subject.tokens(3, _N, seed=1).double()}
        masks = {"token_mask": holes, "context_mask": subject.prefix_mask((4, _N, 2))}
        yield _Case("with a context", calls, pair, {})
        yield _Case("with a masked context", calls, pair, masks)
    if subject.causal and hasattr(layer, "prefill"):
        yield _Case("in chunks", _InChunks(layer), inputs, {})


def _zero_cases(subject: Subject) -> Iterator[_Case]:
    """Tokens that are zero, and whose projections are: there are no biases."""
    layer = subject.copy(torch.float64)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    calls, x = _Twice(layer), subject.tokens(3, _N).double()
    x[:, 1] = 0
    mask = subject.prefix_mask((_N, 3, 0))
    yield _Case("a zero token", calls, {"x": x}, {})
    yield _Case("padding without biases", calls, {"x": x}, {"token_mask": mask})
    yield _Case("zeros alone", calls, {"x": torch.zeros_like(x)}, {})


def _observe_second(findings: Findings, case: _Case, *, at_zero: bool) -> str | None:
    """Hold d/dt <grad F(v + t d), e> to central differences; why not, where that is refused.

    At zero vectors F need not be smooth: second derivatives only are to be finite there.
    """
    variables = case.variables()
    along = {name: _noise_like(value, name) for name, value in variables.items()}
    other = {name: _noise_like(value, f"{name} again") for name, value in variables.items()}

    def slope(at: Variables) -> Tensor:
        return _inner(case.gradients(at), other)

    leaves = {name: value.detach().requires_grad_() for name, value in variables.items()}
    try:
        first = _inner(gradients_of(case.value(leaves), leaves, create_graph=True), other)
        if first.requires_grad:
            made = gradients_of(first, leaves)
        else:
            made = {name: torch.zeros_like(value) for name, value in leaves.items()}
    except RuntimeError as error:  # NotImplementedError is one
        return error_line(error)
    if at_zero:
        for name, second in made.items():
            findings.finite(f"second derivatives by {_shown(name)}, {case.label}", second)
        return None
    what = f"{case.label}: second derivative"
    _close_to_difference(findings, what, _inner(made, along), slope, variables, along)
    return None


def _close_to_difference(
    findings: Findings,
    what: str,
    got: Tensor,
    function: Callable[[Variables], Tensor],
    at: Variables,
    along: Variables,
) -> None:
    """Record how far a slope is from central differences, at the step that agrees best."""
    best = None
    for step in _STEPS:
        difference = sum(
            weight * function(at | {name: at[name] + k * step * d for name, d in along.items()})
            for k, weight in _WEIGHTS.items()
        )
        assert isinstance(difference, Tensor)
        off = _relative(got, difference.detach() / step)
        best = off if best is None else min(best, off)
        if best <= _BOUND:
            break
    assert best is not None
    findings.at_most(what, best, _BOUND)


def _by_jvp(function: Callable[[Variables], Tensor], at: Variables, along: Variables) -> Tensor:
    tangent: Tensor = torch.func.jvp(function, (at,), (along,))[1]
    return tangent


def _by_dual_numbers(
    function: Callable[[Variables], Tensor], at: Variables, along: Variables
) -> Tensor:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(at[name], along[name])  # type: ignore[no-untyped-call]
            for name in at
        }
        dual = forward_ad.unpack_dual(function(duals))  # type: ignore[no-untyped-call]
        return torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent


def _inner(one: Variables, other: Variables) -> Tensor:
    return torch.stack([(one[name] * other[name]).sum() for name in one]).sum()


def _relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference in units of that of `want`, or of 1 if that is greater."""
    return float((got - want).detach().norm() / want.detach().norm().clamp(min=1.0))


def _noise_like(tensor: Tensor, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + sum(map(ord, name)))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return noise.to(tensor.device)


def _shown(name: str) -> str:
    return name.removeprefix("layer.")
