"""Where a model of transformers collects the attention weights of the pass that runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_beside: ContextVar[bool] = ContextVar("_beside", default=False)


@contextmanager
def beside_the_host() -> Iterator[None]:
    """Run attentions that are no part of the model whose weights are collected."""
    token = _beside.set(True)
    try:
        yield
    finally:
        _beside.reset(token)


def collected_weights() -> list[Any] | None:
    """The attention weights of the layers so far; None where they were not asked for.

    Modules are hooked by their class there, so that a layer of another class has to tell by itself.
    """
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # a version that does it in another way
        return None
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return None  # a graph of one layer, or one that asks for nothing: no context to look into
    if not torch.compiler.is_compiling() and _beside.get():
        return None
    outputs = _active_collector.get()  # type: ignore[no-untyped-call, unused-ignore]
    return None if outputs is None else outputs.get("attentions")
