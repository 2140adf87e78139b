"""Code in C++ that is compiled where it runs, for what PyTorch has no operation for on a CPU.

It is compiled by the machine's own compiler when it is first wanted, in about a second, and kept
for the next process. Where that fails, for want of a compiler say, there is no library, and whoever
asked goes on with PyTorch's operations; the log (at level INFO) has the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from primal_attention.whole_files import replacing

OFF = "PRIMAL_NATIVE"  # the environment variable; 0: nothing is compiled or loaded
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_SECONDS = 120  # that a compiler may take
_log, _lock = logging.getLogger(__name__), Lock()


def library(source: Path) -> ctypes.CDLL | None:
    """What a source compiles to, or None where it cannot be had."""
    if os.environ.get(OFF) == "0":
        return None
    with _lock:
        return _library(source, os.environ.get("XDG_CACHE_HOME"), os.environ.get("CXX") or "c++")


@cache
def _library(source: Path, caches: str | None, compiler: str) -> ctypes.CDLL | None:
    """Compiled once in a process; a failure stays one too."""
    try:
        folder = Path(caches or Path.home() / ".cache") / "primal_attention"
        return ctypes.CDLL(str(_compiled(source, folder, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # or there is no home
        said = getattr(error, "stderr", None) or error
        _log.info("%s is not used: %s", source.name, said)
        return None


def _compiled(source: Path, folder: Path, compiler: str) -> Path:
    """The file of a library for this processor, made unless it is there."""
    command = *compiler.split(), *_FLAGS
    known = source.read_text(), *command, shutil.which(command[0]), _processor()
    name = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    path = folder / f"{source.stem}_{name}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            call = *command, str(source), "-o", str(unfinished)
            subprocess.run(call, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return path


def _processor() -> str:
    """What the code is for: a folder may be shared by machines of several kinds."""
    ask = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.11
    return repr(sorted(ask().items()) if ask else platform.uname())
