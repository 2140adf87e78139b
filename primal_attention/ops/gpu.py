"""Where an op runs on a GPU: by its fused form, or in pieces where that does not take the inputs.

The fused forms are written in Triton, which is imported when the first of them runs; the
environment variable ``PRIMAL_FUSED=0`` turns them off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from primal_attention.feature_maps import has_fused_form


@cache
def uses_fused() -> bool:
    """Whether fused ops are not turned off and can be built here."""
    return os.environ.get("PRIMAL_FUSED") != "0" and find_spec("triton") is not None


def has_fused_maps(*inputs: Any) -> bool:
    """Return whether the fused ops have all feature maps that are named among the inputs."""
    return all(has_fused_form(name) for name in inputs if isinstance(name, str) and name)


_imported = cache(import_module)


def fused_or_in_pieces(in_pieces: Callable[..., Any], fused: str) -> Callable[..., Any]:
    """The fused function of a module, whose ``takes`` says which tensors it can; else in pieces.

    Feature maps that the fused ops do not have are left to the pieces.
    """
    module, _, name = fused.rpartition(".")

    def run(first: Tensor, *rest: Any) -> Any:
        if not uses_fused() or not has_fused_maps(*rest):
            return in_pieces(first, *rest)
        imported = _imported(module)
        if not imported.takes(first, *rest):
            return in_pieces(first, *rest)
        with device_of(first):
            return getattr(imported, name)(first, *rest)

    return run


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the device of the tensor."""
    here = not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(tensor.device)
