"""Checkpoints: tensors as safetensors with JSON beside them, replaced in one step.

Reading one runs no code, whoever wrote it: safetensors and JSON hold numbers and text alone. A
checksum over all of it is compared before anything is handed out, so no damage goes unnoticed.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.atomic_files import fitting, replacing
from primal_attention.extras import needing
from primal_attention.foreign_files import REMEDY, UnreadableFileError

LAST, BEST = "last.safetensors", "best.safetensors"  # of a run directory
FORMAT = "primal-attention 2"
_WITHOUT_CHECKSUM = "primal-attention 1"


class Checkpoint(NamedTuple):
    """Tensors by name, and what else there is to say."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors under ``name.``, without that prefix."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint; a reader finds the old file or the new one, never half of one."""
    with needing("checkpoints need safetensors", "train"):
        from safetensors.torch import save

    text = json.dumps(facts)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "facts": text, "sha256": _checksum(contiguous, text)}
    with replacing(path) as temporary:
        # save_file would write beside it first, under a name that no one removes after a kill
        temporary.write_bytes(save(contiguous, metadata))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what ``write_checkpoint`` wrote, onto the CPU.

    A checkpoint of before there were checksums is read with a warning.
    """
    with needing("checkpoints need safetensors", "train"):
        from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint is at {path}")
    try:
        # Its header is compared with the size of the file before any memory is taken.
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") not in (FORMAT, _WITHOUT_CHECKSUM):
                raise UnreadableFileError(
                    f"{path} was not written by this library: its format is "
                    f"{metadata.get('format')!r}, expected {FORMAT!r}; {REMEDY}"
                )
            # Tensors of an open file are its pages, which another process may change.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UnreadableFileError(
            f"{path} is no safetensors file, or a damaged one ({error}); {REMEDY}"
        ) from error
    text = metadata.get("facts", "")
    if metadata["format"] == _WITHOUT_CHECKSUM and "sha256" not in metadata:
        logging.getLogger(__name__).warning(
            "%s was written without a checksum, so damage in it goes unnoticed; "
            "write_checkpoint(path, *read_checkpoint(path)) adds one",
            path,
        )
    elif metadata.get("sha256") != _checksum(tensors, text):
        raise UnreadableFileError(f"{path} is damaged: its checksum is another; {REMEDY}")
    with fitting(path, "a whole checkpoint"):
        facts = json.loads(text)
        if not isinstance(facts, dict):
            raise ValueError(f"its facts are no object but {text:.40}")
    return Checkpoint(tensors, facts)


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """Compute the SHA-256 of facts, names, types, shapes and numbers."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
