"""Launches in Triton's interpreter, which prepare Triton's language once.

The interpreter does that again whenever one function of an op calls another: it looks through all
names of the language, finds that nothing is left to do, and takes half of the time for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def prepared_once() -> Iterator[None]:
    """Every launch."""
    prepare = interpreter._patch_lang

    def prepared(function: Callable[..., Any]) -> Any:
        languages = _languages(function)
        if languages and not any(tl.core.is_builtin(each.load) for each in languages):
            return interpreter._LangPatchScope()  # nothing to take back
        return prepare(function)

    with patch.object(interpreter, "_patch_lang", prepared):
        yield


@cache
def _languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The language, as a function sees it."""
    return [each for each in (tl, tl.core) if any(each is v for v in function.__globals__.values())]
