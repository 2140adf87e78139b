"""Compare a model with the tensors that are to go into it, by names and shapes.

The model may be on the ``meta`` device, where it takes no memory: a file that says a size which its
tensors do not have is refused before anything of that size is allocated.
"""

from collections.abc import Mapping

from torch import Tensor, nn


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors are those of the model; of tied ones, one is enough."""
    state = model.state_dict(keep_vars=True)
    wanted = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    unknown = sorted(tensors.keys() - wanted.keys())
    if unknown:
        raise ValueError(f"the model has no tensor {_shown(unknown)}")
    given = {_identity(wanted[name]) for name in tensors}
    missing = sorted(name for name, each in wanted.items() if _identity(each) not in given)
    if missing:
        raise ValueError(f"the tensor {_shown(missing)} of the model is missing")
    for name, tensor in tensors.items():
        ours, theirs = tuple(wanted[name].shape), tuple(tensor.shape)
        if ours != theirs:
            raise ValueError(f"{name} has shape {theirs}, the model has {ours}")


def _identity(tensor: Tensor) -> tuple[int, ...]:
    """Equal for tied tensors."""
    plain = type(tensor) in (Tensor, nn.Parameter)  # a sharded one has no memory of its own
    if not plain or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
