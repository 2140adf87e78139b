"""The same random numbers for every test, and the libraries as quiet as they can be."""

from functools import cache

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="module")
def one_registry():
    """Of ONNX, torch would read all that it knows anew for each export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        once = staticmethod(cache(ONNXRegistry.from_torchlib))
        patch.setattr(ONNXRegistry, "from_torchlib", once)
        yield
