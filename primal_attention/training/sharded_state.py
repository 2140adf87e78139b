"""Whole tensors out of a model or optimiser that may be sharded, and back in."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """Gather every parameter and buffer on the CPU; all processes take part."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put whole tensors back into a model."""
    like = model.state_dict()
    model.load_state_dict({name: _sharded(tensors[name], like[name]) for name in tensors})


def gather_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Gather the optimiser's state of each parameter, by its number, on the CPU."""
    return {
        f"{index}.{name}": _whole(value)
        for index, kept in optimizer.state_dict()["state"].items()
        for name, value in kept.items()
    }


def check_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless what was kept is of the optimiser's parameters; it changes nothing."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"{key} is of none of {len(parameters)} parameters")
        if tensor.numel() != 1 and tensor.shape != parameters[int(index)].shape:
            shapes = tuple(tensor.shape), tuple(parameters[int(index)].shape)
            raise ValueError("{} of parameter {} has shape {}, not {}".format(name, index, *shapes))


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what the optimiser had kept; its settings stay as they were built."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        like = parameters[int(index)]
        # Moments have the shape of their parameter; counts of steps have none.
        value = _sharded(tensor, like) if tensor.shape == like.shape else tensor
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)


def _sharded(tensor: Tensor, like: Tensor) -> Tensor:
    """Distribute a tensor over the processes as another of its shape is."""
    if not isinstance(like, DTensor):
        return tensor
    with torch.no_grad():
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
