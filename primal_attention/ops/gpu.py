"""Where an op runs on a GPU: by its fused form, or in pieces where that does not take the inputs.

The fused forms are written in Triton, which is imported when the first of them runs; the
environment variable ``PRIMAL_FUSED=0`` turns them off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def uses_fused() -> bool:
    """Whether fused ops are not turned off and can be built here."""
    return os.environ.get("PRIMAL_FUSED") != "0" and find_spec("triton") is not None


def on_gpu(
    op: Any,  # what torch.library.custom_op made
    in_pieces: Callable[..., Any],
    module: str,
    function: str,
) -> None:
    """Register the function of a module of fused ops, whose ``takes`` says which tensors it can."""

    def run(first: torch.Tensor, *rest: Any) -> Any:
        if not uses_fused():
            return in_pieces(first, *rest)
        fused = import_module(module)
        if not fused.takes(first, *rest):
            return in_pieces(first, *rest)
        with torch.cuda.device(first.device):
            return getattr(fused, function)(first, *rest)

    op.register_kernel("cuda", run)
