"""Clauses that every module of any kind should keep: shapes, batches, saving, finite numbers."""

import torch
from torch import Tensor, nn

from primal_attention.testing.probes import PassResult, Probe, compare_runs, forward
from primal_attention.testing.report import Findings, deviation, magnitude
from primal_attention.testing.subject import Subject

_SHAPES = ((1, 1), (3, 1), (2, 2), (1, 7), (2, 131))  # B, N
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_AUTOCAST_BOUND = 16 * 2.0**-8  # sixteen roundings to bfloat16
_GRADIENT_GROWTH = 1e6
_ENORMOUS = "input of size 1e4"  # whose gradients may be of any size


def input_dependence(subject: Subject) -> Findings:
    """The output depends on the input, by values and by gradients.

    Without this the comparisons of the other clauses could hold between constants. Whether tokens
    influence each other is reported and not demanded: a layer that works on each token by itself
    is legal.
    """
    mask = subject.prefix_mask((11, 7))
    findings = subject.findings(_describe_mixing(subject.probe(mask)))
    for label, probe in subject.probes(mask):
        run, other = probe.run(), probe._replace(x=subject.tokens(2, 11, seed=2)).run()
        change = deviation(other.output[probe.real], run.output[probe.real])
        findings.at_least(f"change of the output with the input {label}", change, 1e-4)
        findings.at_least(f"input gradient {label}", magnitude(run.d_input[probe.real]), 1e-4)
    return findings


def _describe_mixing(probe: Probe) -> str:
    cotangent = torch.zeros_like(probe.x)
    cotangent[:, -1] = probe.x[:, 0]
    run = probe._replace(cotangent=cotangent, token_mask=None).run()
    influence = magnitude(run.d_input[:, :-1])
    if influence == 0:
        return "the output depends on the input; tokens do not influence each other"
    return f"the output depends on the input; tokens influence each other ({influence:.1e})"


def shapes_and_dtypes(subject: Subject) -> Findings:
    """Shape, dtype and device of the output are those of the input, for odd sizes and dtypes."""
    findings = subject.findings("the output has the shape, dtype and device of the input")
    for dtype in _DTYPES:
        layer = subject.copy(dtype)
        for batch, length in _SHAPES:
            x = subject.tokens(batch, length).to(dtype)
            try:
                output = forward(layer, x)
            except RuntimeError as error:
                if dtype is torch.float16 and "not implemented for 'Half'" in str(error):
                    findings.detail += f"; no float16 here ({error})"
                    break
                raise
            _demand_alike(output, x)
            findings.finite(f"{dtype}, B={batch}, N={length}", output)
    return findings


def _demand_alike(output: Tensor, x: Tensor) -> None:
    for name in ("shape", "dtype", "device"):
        got, want = getattr(output, name), getattr(x, name)
        if got != want:
            raise ValueError(f"{name} of the output is {got}, of the input {want}")


def batch_independence(subject: Subject) -> Findings:
    """A sequence alone gives what it gives in a batch, and a permuted batch a permuted output."""
    findings = subject.findings("a sequence gives the same alone, in a batch and in another order")
    for label, probe in subject.probes(subject.prefix_mask((13, 8, 3))):
        want = probe.run()
        for rows in ([0], [1], [2], [2, 0, 1]):
            what = f"sequence {rows[0]} alone" if len(rows) == 1 else "a permuted batch"
            compare_runs(findings, f"{what} {label}", probe.rows(rows).run(), want.rows(rows))
    return findings


def determinism(subject: Subject) -> Findings:
    """In eval mode the same input gives the same bits, whatever the random number generator."""
    findings = subject.findings("in eval mode the same input gives the same bits")
    layer = subject.copy()
    x = subject.tokens(2, 13)
    mask = subject.prefix_mask((13, 8))
    want = forward(layer, x, token_mask=mask)
    findings.close("a second call", layer(x, token_mask=mask), want, 0.0)
    findings.close("a third call", layer(x, token_mask=mask), want, 0.0)
    torch.manual_seed(1)
    findings.close("another global seed", layer(x, token_mask=mask), want, 0.0)
    return findings


def state_dict(subject: Subject) -> Findings:
    """A module that loads the state dict gives the same bits, also from contiguous clones."""
    source = subject.copy()
    _scramble(source, seed=1)
    x = subject.tokens(2, 13)
    want = forward(source, x)
    saved = dict(source.state_dict())
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"entry {name!r} of the state dict is a {type(value).__name__}")
    clones = {name: value.detach().clone().contiguous() for name, value in saved.items()}

    built = subject.factory is not None
    findings = subject.findings(
        "a newly built module that loads the state dict gives the same bits"
        if built
        else "a copy that loads the state dict gives the same bits; pass a factory to test buffers "
        "that are not saved"
    )
    for label, state in (("state dict", saved), ("contiguous clones", clones)):
        target = subject.fresh() or subject.copy()
        _scramble(target, seed=2)
        target.load_state_dict(state, strict=True)
        findings.close(f"outputs after loading the {label}", forward(target, x), want, 0.0)
    return findings


def _scramble(layer: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in layer.state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
                value.add_(0.01 * noise.to(value))


def training_mode(subject: Subject) -> Findings:
    """Forward and backward in training mode run and are finite."""
    findings = subject.findings("forward and backward in training mode run and are finite")
    for label, probe in subject.probes(subject.prefix_mask((13, 8, 3))):
        cotangent = subject.tokens(3, 13, seed=1)  # at padding too
        run = probe._replace(layer=subject.copy().train(), cotangent=cotangent).run()
        findings.finite(f"training mode {label}", *run.values())
    return findings


def _degenerate_inputs(subject: Subject, x: Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Degenerate tokens and masks of real ones."""
    batch, length = x.shape[:2]
    zeros, hole = torch.zeros_like(x), x.clone()
    hole[:, 2] = 0
    one, none = (subject.prefix_mask([n] * batch, length) for n in (1, 0))
    return {
        "zero input": (zeros, None),
        "a zero token among others": (hole, None),
        "constant input": (x[:1, :1].expand_as(x), None),
        _ENORMOUS: (1e4 * x, None),
        "one real token": (x, one),
        "one real token that is zero": (zeros, one),
        "no real token": (x, none),
    }


def finite_values(subject: Subject) -> Findings:
    """Degenerate inputs give finite outputs and gradients; none explodes near a singular point.

    A gradient of 1e12 is finite and still ruins a training run, so gradients are also held to a
    million times those of an ordinary input, except for the input that is itself enormous.
    """
    findings = subject.findings(
        "degenerate inputs give finite outputs and gradients of ordinary size"
    )
    for dtype in (torch.float32, torch.bfloat16):
        layers = {"": subject.copy(dtype)}
        if subject.was_asleep:
            layers = {" as built": subject.copy(dtype, as_built=True), " awake": layers[""]}
        for label, layer in layers.items():
            _observe_cases(findings, subject, layer, f"{dtype}{label}")
    return findings


def _observe_cases(findings: Findings, subject: Subject, layer: nn.Module, label: str) -> None:
    x, cotangent = subject.tokens(2, 7), subject.tokens(2, 7, seed=1)
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    usual = _largest_gradient(Probe(layer, x.to(dtype), cotangent).run())
    for case, (tokens, mask) in _degenerate_inputs(subject, x.to(dtype)).items():
        run = Probe(layer, tokens, cotangent, mask).run()
        findings.finite(f"{case} in {label}", *run.values())
        if case != _ENORMOUS:
            growth = _largest_gradient(run) / max(usual, 1.0)
            findings.at_most(f"gradients of {case} in {label}", growth, _GRADIENT_GROWTH)


def _largest_gradient(run: PassResult) -> float:
    return max(map(magnitude, [run.d_input, *run.d_parameters.values()]))


def autocast(subject: Subject) -> Findings:
    """Under bfloat16 autocast outputs and gradients are near those of float32."""
    findings = subject.findings("under bfloat16 autocast, outputs and gradients are near float32's")
    probe = subject.probe(subject.prefix_mask((13, 8, 3)))
    want = probe.run()
    got = probe.run(within=torch.autocast(subject.device.type, dtype=torch.bfloat16))
    findings.finite("autocast", *got.values())
    pairs = {"outputs": (got.output, want.output), "input gradients": (got.d_input, want.d_input)}
    if want.d_parameters:
        pairs["parameter gradients"] = (_joined(got), _joined(want))
    for what, (low_tensor, tensor) in pairs.items():
        findings.at_most(f"autocast: {what}", _relative_norm(low_tensor, tensor), _AUTOCAST_BOUND)
    return findings


def _relative_norm(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of `want`.

    Not the largest difference: where a feature map has a kink, rounding near it moves one gradient
    by a whole step, and rightly so.
    """
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-6))


def _joined(run: PassResult) -> Tensor:
    """All parameter gradients in one vector: some are rounding noise by themselves."""
    return torch.cat([gradient.flatten() for gradient in run.d_parameters.values()])
