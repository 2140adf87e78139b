"""Pictures as cases: decoded once and kept, or decoded whenever they are asked for.

Letters: B pictures, S pixels of a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from primal_attention.tasks.images.augmentation import Augmentation
from primal_attention.tasks.images.boxes import crop, draw_crops
from primal_attention.tasks.images.decoding import decoded
from primal_attention.tasks.images.folders import Encoded
from primal_attention.tasks.task import Batch, Cases

CENTRE = 7 / 8  # what an evaluation sees of the shorter side of a picture that is decoded anew


@dataclass(frozen=True, eq=False)
class OnDemand:
    """Pictures that are decoded when they are asked for; stands in for a tensor of them."""

    encoded: Encoded
    places: Tensor  # which of them, on the CPU
    size: int  # S
    device: torch.device

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Their centres, uint8 [B, 3, S, S]."""
        places = self.places[indices.cpu()].tolist()
        return decoded(self.encoded, places, self.size, centre=CENTRE).to(self.device)

    def cropped(self, indices: Tensor, crops: Tensor) -> Tensor:
        """The crops [B, 4] of them, from all of their pixels."""
        places = self.places[indices.cpu()].tolist()
        return decoded(self.encoded, places, self.size, crops=crops.cpu()).to(self.device)

    def to(self, device: torch.device) -> OnDemand:
        """The same on another device, once they are decoded."""
        return replace(self, device=device)


@dataclass(frozen=True)
class PictureCases(Cases):
    """Pictures ``pictures`` uint8 [B, 3, S, S] and their classes [B].

    They are trained on cropped at random and augmented, with probabilities of the classes as the
    target; evaluations see them as they are.
    """

    num_classes: int = 0
    augmentation: Augmentation | None = None

    @property
    def resident(self) -> bool:
        """Whether the pictures are decoded and on the device."""
        return isinstance(self.inputs["pictures"], Tensor)

    def drawn(self, indices: Tensor) -> Batch:
        """Those cases as they are trained on."""
        if self.augmentation is None:
            return self[indices]
        stored: Any = self.inputs["pictures"]
        crops = draw_crops(len(indices), indices.device)
        if self.resident:
            x = crop(stored[indices].to(crops.dtype), crops)
        else:
            x = stored.cropped(indices, crops).to(crops.dtype)
        x, target = self.augmentation(x, self.target[indices], self.num_classes)
        return Batch({"pictures": x}, target)

    def joined(self, other: Cases) -> PictureCases:
        """These cases and, after them, the others, of the same files."""
        mine: Any = self.inputs["pictures"]
        theirs: Any = other.inputs["pictures"]
        if self.resident:
            pictures = torch.cat([mine, theirs])
        else:
            pictures = replace(mine, places=torch.cat([mine.places, theirs.places]))
        target = torch.cat([self.target, other.target])
        return replace(self, inputs={"pictures": pictures}, target=target)


def picture_cases(
    encoded: Encoded, places: Sequence[int], size: int, *, num_classes: int, resident: bool
) -> PictureCases:
    """Some of the pictures; ``resident`` decodes them now."""
    chosen = torch.as_tensor(places)
    stored: Any = decoded(encoded, chosen.tolist(), size) if resident else None
    stored = OnDemand(encoded, chosen, size, chosen.device) if stored is None else stored
    target = torch.from_numpy(encoded.labels)[chosen]
    return PictureCases({"pictures": stored}, target, num_classes)
