"""Sounds as tasks: which class is a clip?

Letters: B clips, N samples, K classes.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.audio.sets import SILENCE, SOUNDS, Sounds
from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.task import CLASSIFICATION, Batch, Cases, Sizes, Task


@dataclass(frozen=True)
class SoundAugmentation:
    """Changes of clips that are trained on, each at random.

    Attributes:
        crop: Samples that a clip is cut or filled up to; None: all of them.
        speed: Speed changes by at most this part, and the pitch with it.
        tilt: High against low frequencies: at most so much of a sample is taken from the next.
        time_mask: At most this part of a clip is set to zero.
        mixup: Parameter of the Beta distribution of the shares of two clips in a mixed one.
    """

    crop: int | None = None
    speed: float = 0.2
    tilt: float = 0.3
    time_mask: float = 0.1
    mixup: float = 0.1

    def __call__(self, x: Tensor, lengths: Tensor, target: Tensor) -> Batch:
        """Change samples [B, N] with probabilities of classes [B, K] as the target."""
        B, N = x.shape
        size = min(self.crop or N, N)
        place, gain, faster, slope, hidden, since = torch.rand(6, B, 1, device=x.device)
        rate = 1 + self.speed * (2 * faster - 1)
        left_over = size - lengths[:, None] / rate  # negative: the clip is cut
        places = (torch.arange(size, device=x.device) - place * left_over) * rate
        token_mask = (places >= 0) & (places <= lengths[:, None] - 1)
        places = places.clamp(0, N - 1)
        before = places.floor().clamp(max=N - 2).long()
        x = torch.lerp(x.gather(1, before), x.gather(1, before + 1), places - before)
        x = x - self.tilt * (2 * slope - 1) * F.pad(x[:, :-1], (1, 0))
        since = torch.arange(size, device=x.device) - size * since  # the hidden part begins
        x = x * (token_mask & ((since < 0) | (since >= self.time_mask * size * hidden)))
        x = (0.5 + gain) * x
        if self.mixup:
            beta = torch.full((B, 2), self.mixup, device=x.device)
            share = torch.distributions.Dirichlet(beta).sample().amax(1, keepdim=True)
            other = torch.randperm(B, device=x.device)
            x, target = torch.lerp(x[other], x, share), torch.lerp(target[other], target, share)
            token_mask = token_mask | token_mask[other]
        return Batch({"x": x[..., None], "token_mask": token_mask}, target)


SOUND_AUGMENTATIONS = {"sound": SoundAugmentation(), "speech": SoundAugmentation(crop=4096)}


@dataclass(frozen=True)
class SoundCases(Cases):
    """Clips as ``codes`` uint8 [B, N] with ``lengths`` [B], and their classes [B].

    A model is called with ``x`` [B, N, 1], of root mean square 1 in each clip, and ``token_mask``.
    """

    num_classes: int = 0
    augmentation: SoundAugmentation | None = None

    def __getitem__(self, indices: Tensor) -> Batch:
        """Select clips, as long as the longest of them."""
        lengths = self.inputs["lengths"][indices]
        x, token_mask = self._samples(indices, int(lengths.max()))
        return Batch({"x": x[..., None], "token_mask": token_mask}, self.target[indices])

    def drawn(self, indices: Tensor) -> Batch:
        """Select clips to train on, and change them."""
        if self.augmentation is None:
            return self[indices]
        target = F.one_hot(self.target[indices], self.num_classes).float()
        x, _ = self._samples(indices, self.inputs["codes"].shape[1])
        return self.augmentation(x, self.inputs["lengths"][indices], target)

    def _samples(self, indices: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        y = self.inputs["codes"][indices, :longest].float() / 127.5 - 1
        lengths = self.inputs["lengths"][indices, None]
        token_mask = torch.arange(longest, device=y.device) < lengths
        x = token_mask * y.sign() * (256 ** y.abs() - 1) / 255
        power = x.square().sum(1, keepdim=True) / lengths
        return x * (power + 1e-8).rsqrt(), token_mask


def audio_task(
    name: str,
    *,
    folder: Path | None = None,
    num_samples: int,
    valid: float,
    seed: int,
    augmentation: SoundAugmentation | None = None,
) -> Task:
    """Make a task of a set.

    Args:
        name: A set, whose official test part is tested on, or ``<set>-<group>``: that group is.
        folder: Of the data.
        num_samples: What is longer is cut.
        valid: The part of the training clips of each class that is held out.
        seed: Of the choice of those held out.
        augmentation: What the training clips go through.
    """
    base, group = name, None
    if SOUNDS.find(name, folder) is None and "-" in name:
        base, _, group = name.rpartition("-")
    found = SOUNDS.load(base, folder)
    is_test = found.is_test if group is None else found.groups == group
    if not is_test.any() or is_test.all():
        groups = ", ".join(f"{base}-{each}" for each in np.unique(found.groups))
        raise ValueError(f"{name} has no clips to test on or to train on; name one of {groups}")
    rest = np.flatnonzero(~is_test)
    kept, held_out = stratified_split(found.labels[rest], valid, seed)
    num_samples = min(num_samples, int(found.lengths.max()))
    train, validated, test = (
        _cases(found, places, num_samples)
        for places in (rest[kept], rest[held_out], np.flatnonzero(is_test))
    )
    sizes = Sizes(num_samples, len(found.classes), num_channels=1)
    train = replace(train, augmentation=augmentation)
    return Task(f"audio/{name}", CLASSIFICATION, sizes, train, validated, test, found.classes)


def _cases(found: Sounds, places: NDArray[np.int64], longest: int) -> SoundCases:
    lengths = found.lengths.clip(max=longest)
    starts = np.cumsum(found.lengths) - found.lengths
    codes = np.full((len(places), longest), SILENCE, np.uint8)
    for row, place in zip(codes, places, strict=True):
        row[: lengths[place]] = found.codes[starts[place] : starts[place] + lengths[place]]
    inputs = {"codes": torch.from_numpy(codes), "lengths": torch.from_numpy(lengths[places])}
    return SoundCases(inputs, torch.from_numpy(found.labels[places]), len(found.classes))
