"""Sharded checkpoints: each process writes its part, and any number of processes reads them.

A checkpoint is a folder ``step-<number>`` of ``torch.distributed.checkpoint``. It gets this name
once it is whole, so a process that is killed while it writes leaves the one before it in place.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

_PREFIX, _UNFINISHED = "step-", "unfinished"


def save_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, step: int) -> Path:
    """Write model and optimiser after a step and remove older checkpoints; all take part."""
    path, unfinished = folder / f"{_PREFIX}{step:012}", folder / _UNFINISHED
    if _is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    _wait()
    weights, kept = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": kept}, checkpoint_id=unfinished)
    _wait()
    if _is_first():
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
        for older in _whole(folder):
            if older < path:
                shutil.rmtree(older)
    _wait()
    return path


def load_sharded(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Read the last checkpoint of a folder into both, and return its step; 0 without one."""
    found = _whole(folder)
    if not found:
        return 0
    weights, kept = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": kept}
    load(state, checkpoint_id=found[-1])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(found[-1].name.removeprefix(_PREFIX))


def _whole(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the last one at the end."""
    return sorted(folder.glob(f"{_PREFIX}*"))


def _is_first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def _wait() -> None:
    if distributed.is_initialized():
        distributed.barrier()
