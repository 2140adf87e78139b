"""Checkpoints: tensors as safetensors with JSON beside them, replaced in one step.

Reading one runs no code, whoever wrote it: safetensors and JSON hold numbers and text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from primal_attention.whole_files import replacing

FORMAT = "primal-attention 1"


class Checkpoint(NamedTuple):
    """Tensors by name, and what else there is to say."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors under ``name.``, without that prefix."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint; a reader finds the old file or the new one, never half of one."""
    from safetensors.torch import save

    metadata = {"format": FORMAT, "facts": json.dumps(facts)}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        # save_file would write beside it first, under a name that no one removes after a kill
        temporary.write_bytes(save(contiguous, metadata))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what ``write_checkpoint`` wrote, onto the CPU."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint is at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or a damaged one: {error}") from error
    return Checkpoint(tensors, _facts(path, metadata))


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by this library: its format is "
            f"{metadata.get('format')!r}, expected {FORMAT!r}"
        )
    try:
        facts = json.loads(metadata["facts"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} has damaged facts: {error}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path} has damaged facts: got {facts!r}")
    return facts
