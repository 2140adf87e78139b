"""Launches in Triton's interpreter, without what it does in vain.

It prepares Triton's language for a launch, and again whenever one function of an op calls another:
it looks through all names of the language and finds that nothing is left to do. And it works out
whether sums and products of integers overflow, and looks at the answers when debugging alone. The
two are half of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def nothing_in_vain() -> Iterator[None]:
    """Every launch."""
    prepare, builder = interpreter._patch_lang, interpreter.interpreter_builder
    assert not builder.options.debug

    def prepared(function: Callable[..., Any]) -> Any:
        languages = _languages(function)
        if languages and not any(tl.core.is_builtin(each.load) for each in languages):
            return interpreter._LangPatchScope()  # nothing to take back
        return prepare(function)

    with (
        patch.object(interpreter, "_patch_lang", prepared),
        patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


@cache
def _languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The language, as a function sees it."""
    return [each for each in (tl, tl.core) if any(each is v for v in function.__globals__.values())]
