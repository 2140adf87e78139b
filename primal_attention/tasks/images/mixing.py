"""Two pictures in one: mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019).

Letters: B pictures, S pixels of a side, K classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta

from primal_attention.tasks.images.boxes import inside


class Mixed(NamedTuple):
    """Pictures and how much of each class is in them."""

    x: Tensor  # [B, 3, S, S]
    target: Tensor  # [B, K]


def smoothed(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Probabilities [B, K] of labels [B], a part of each shared out evenly over all classes."""
    certain = labels[:, None] == torch.arange(num_classes, device=labels.device)
    return (1 - smoothing) * certain + smoothing / num_classes


def mix(x: Tensor, target: Tensor, mixup: float, cutmix: float) -> Mixed:
    """Each picture with that on the other side of the batch: blended, or one pasted into the other.

    Which of the two, and how much, is drawn once for the batch.

    Args:
        x: The pictures [B, 3, S, S].
        target: Their classes [B, K].
        mixup: Both parameters of the Beta distribution of the part that stays, where they blend.
        cutmix: The same where one is pasted.
    """
    other, pasting = x.flip(0), torch.rand((), device=x.device) < 0.5
    part = _beta(mixup, x)
    blended = part * x + (1 - part) * other
    box = inside(_box(_beta(cutmix, x)), x.shape[-1])
    pasted = torch.where(box, other, x)
    kept = torch.where(pasting, 1 - box.to(x.dtype).mean(), part)
    return Mixed(torch.where(pasting, pasted, blended), kept * target + (1 - kept) * target.flip(0))


def _beta(parameter: float, x: Tensor) -> Tensor:
    both = torch.full((), parameter, device=x.device)
    return Beta(both, both, validate_args=False).sample()


def _box(kept: Tensor) -> Tensor:
    """A square of the area that is not kept, around any place, cut off at the edges, [1, 4]."""
    half, place = (1 - kept).sqrt() / 2, torch.rand(2, device=kept.device)
    low, high = (place - half).clamp(min=0), (place + half).clamp(max=1)
    return torch.cat([low, high - low])[None]
