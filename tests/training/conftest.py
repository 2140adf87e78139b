"""What tests of several kinds of runs ask for."""

import warnings

import pytest
import torch
from torch import nn


@pytest.fixture
def compiled(monkeypatch):
    """For each graph that is compiled, in no time, whether it is with gradients."""
    graphs, original = [], nn.Module.compile

    def quickly(module, **options):
        original(module, backend=count, **options)

    def count(graph, inputs):
        graphs.append(torch.is_grad_enabled())
        return graph

    monkeypatch.setattr(nn.Module, "compile", quickly)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo's first pass
        yield graphs
