"""Run a model over data and tell what its attention layers did, batch by batch."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.analysis.layers import Layer, Run, find_layers
from primal_attention.analysis.matrices import HeadMatrices

Data = Tensor | Mapping[str, Any] | Iterable[Any]
"""One batch (a tensor, a mapping of arguments, a tuple of them), or a list or iterator of such."""


class Pass(NamedTuple):
    """What one layer did with one batch."""

    layer: Layer
    run: Run


class LayerMatrices(NamedTuple):
    """The matrices of one layer for one sequence."""

    layer: str
    heads: HeadMatrices


def attention_matrices(model: nn.Module, data: Data) -> Iterator[LayerMatrices]:
    """Attention and kernel matrices of every layer and sequence, one after the other."""
    for layer, run in passes(model, data):
        for heads in run.matrices():
            yield LayerMatrices(layer.name, heads)


def passes(model: nn.Module, data: Data, layers: list[Layer] | None = None) -> Iterator[Pass]:
    """All passes of the layers, in evaluation mode and without gradients.

    The model is as before after the last one.
    """
    layers = find_layers(model).found if layers is None else layers
    training = [module for module in model.modules() if module.training]
    heard: list[Pass] = []
    batches = batches_of(data)
    with ExitStack() as stack:
        stack.callback(_train, training)
        model.eval()
        for layer in layers:
            layer.listen(partial(_note, heard, layer), stack)
        for args, kwargs in batches:
            heard.clear()
            with torch.no_grad():
                model(*args, **kwargs)
            yield from tuple(heard)  # the model may be called in between


def batches_of(data: Data) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call of the model."""
    if isinstance(data, Tensor | Mapping | tuple):
        data = [data]
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ValueError(
            "data must be a batch or an iterable of batches (tensors, mappings of arguments, or "
            f"tuples of them), got {type(data).__name__}"
        )
    return map(_arguments, data)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise ValueError(
        "data: a batch must be a tensor, a mapping of arguments or a tuple of them, "
        f"got {type(batch).__name__}"
    )


def _note(heard: list[Pass], layer: Layer, run: Run) -> None:
    heard.append(Pass(layer, run))


def _train(modules: list[nn.Module]) -> None:
    for module in modules:
        module.training = True
