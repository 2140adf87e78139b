"""Layers to export, inputs for them, and what an exported graph is held to."""

import inspect

import torch
from torch import nn
from torch.export import Dim

from primal_attention import ATTENTIONS, PrimalAttention, build_attention

D, H = 12, 3
TEXT = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
BOUNDED = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC(min=2, max=40)}


class Layers(nn.Module):
    """Several mechanisms over the same tokens."""

    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x, token_mask=None):
        return {name: layer(x, token_mask=token_mask) for name, layer in self.layers.items()}


def primal(weights, **options):
    return PrimalAttention(D, H, 5, weights=weights, samples_per_direction=2, **options)


def layer(name, **options):
    known = inspect.signature(ATTENTIONS[name]).parameters
    defaults = {"max_tokens": 41, "scales": [1, 2, 2], "num_iterations": 3}
    chosen = {option: value for option, value in defaults.items() if option in known}
    return build_attention(name, D, H, **chosen | options)


def sequences(batch, tokens, *, masked=True):
    """Tokens with holes, one sequence without any real one."""
    inputs = {"x": torch.randn(batch, tokens, D)}
    if masked:
        mask = torch.rand(batch, tokens) > 0.4
        mask[0], mask[2:3] = True, False
        inputs["token_mask"] = mask
    return inputs


def onnx_runner(path):
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs):
        feed = {name: x.numpy() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        return dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True))

    return run


@torch.no_grad()
def assert_same(model, run, cases, tolerance=1e-5):
    for inputs in cases:
        expected, actual = model(**inputs), run(inputs)
        if isinstance(expected, torch.Tensor):
            expected = {"output": expected}
        assert list(actual) == list(expected)
        for name, y in expected.items():
            torch.testing.assert_close(actual[name], y, rtol=tolerance, atol=tolerance)


def assert_exported(model, inputs, cases, dynamic, folder):
    """By torch alone; what no axis is dynamic of, such as ``use_cache=False``, is fixed."""
    path = folder / "model.onnx"
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    names = ["output"] if isinstance(outputs, torch.Tensor) else list(outputs)
    shapes = dict.fromkeys(inputs) | dynamic
    options = {"dynamic_shapes": shapes, "output_names": names, "verbose": False}
    torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, **options)
    assert_same(model, onnx_runner(path), cases)
