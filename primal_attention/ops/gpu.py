"""Where an op runs on a GPU: by its fused form, or in pieces where that does not take the inputs.

The fused forms are written in Triton, which is imported when the first of them runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def has_triton() -> bool:
    """Whether fused ops can be built here."""
    return find_spec("triton") is not None


def on_gpu(
    op: torch.library.CustomOpDef, in_pieces: Callable[..., Any], module: str, function: str
) -> None:
    """Register the function of a module of fused ops, whose ``takes`` says which tensors it can."""

    def run(first: torch.Tensor, *rest: Any) -> Any:
        if not has_triton():
            return in_pieces(first, *rest)
        fused = import_module(module)
        chosen = getattr(fused, function) if fused.takes(first, *rest) else in_pieces
        return chosen(first, *rest)

    op.register_kernel("cuda", run)
