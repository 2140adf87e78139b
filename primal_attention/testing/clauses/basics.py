"""Clauses that every module of any kind should keep: shapes, batches, repetition, saving."""

import torch
from torch import Tensor, nn

from primal_attention.testing.calls import forward, forward_backward
from primal_attention.testing.findings import Findings, deviation, magnitude
from primal_attention.testing.subject import Subject
from primal_attention.testing.tokens import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    prefix_mask,
    real_only,
)

_SHAPES = ((1, 1), (3, 1), (2, 2), (1, 7), (2, 131))  # B, N
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def input_dependence(subject: Subject) -> Findings:
    """The output depends on the input, by values and by gradients.

    Without this the comparisons of the other clauses could hold between constants. Whether tokens
    influence each other is reported and not demanded: a layer that works on each token by itself
    is legal.
    """
    layer = subject.copy()
    x = subject.tokens(2, 11)
    mask = prefix_mask((11, 7), 11, subject.device)
    findings = subject.findings(_describe_mixing(subject, layer, x))
    for label, token_mask in (("without a mask", None), ("with a mask", mask)):
        real = torch.ones_like(mask) if token_mask is None else token_mask
        cotangent = real_only(subject.tokens(2, 11, seed=2), real)
        run = forward_backward(layer, x, cotangent, token_mask=token_mask)
        other = forward_backward(
            layer, subject.tokens(2, 11, seed=1), cotangent, token_mask=token_mask
        )
        change = deviation(other.output[real], run.output[real])
        findings.at_least(f"change of the output with the input {label}", change, 1e-4)
        findings.at_least(f"input gradient {label}", magnitude(run.d_input[real]), 1e-4)
    return findings


def _describe_mixing(subject: Subject, layer: nn.Module, x: Tensor) -> str:
    cotangent = torch.zeros_like(x)
    cotangent[:, -1] = subject.tokens(2, 11, seed=2)[:, -1]
    influence = magnitude(forward_backward(layer, x, cotangent).d_input[:, :-1])
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
    layer = subject.copy()
    x = subject.tokens(3, 13)
    mask = prefix_mask((13, 8, 3), 13, subject.device)
    for label, token_mask in (("without a mask", None), ("with a mask", mask)):
        real = torch.ones_like(mask) if token_mask is None else token_mask
        cotangent = real_only(subject.tokens(3, 13, seed=1), real)
        want = forward_backward(layer, x, cotangent, token_mask=token_mask)
        for rows in ([0], [1], [2], [2, 0, 1]):
            some = None if token_mask is None else token_mask[rows]
            got = forward_backward(layer, x[rows], cotangent[rows], token_mask=some)
            what = f"sequence {rows[0]} alone" if len(rows) == 1 else "a permuted batch"
            what = f"{what} {label}"
            findings.close(f"{what}: outputs", got.output, want.output[rows], OUTPUT_BOUND)
            d_want = want.d_input[rows]
            findings.close(f"{what}: input gradients", got.d_input, d_want, GRADIENT_BOUND)
    return findings


def determinism(subject: Subject) -> Findings:
    """In eval mode the same input gives the same bits, whatever the random number generator."""
    findings = subject.findings("in eval mode the same input gives the same bits")
    layer = subject.copy()
    x = subject.tokens(2, 13)
    mask = prefix_mask((13, 8), 13, subject.device)
    want = forward(layer, x, token_mask=mask)
    findings.identical("a second call", layer(x, token_mask=mask), want)
    findings.identical("a third call", layer(x, token_mask=mask), want)
    torch.manual_seed(1)
    findings.identical("another global seed", layer(x, token_mask=mask), want)
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
        findings.identical(f"outputs after loading the {label}", forward(target, x), want)
    return findings


def _scramble(layer: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in layer.state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
                value.add_(0.01 * noise.to(value))
