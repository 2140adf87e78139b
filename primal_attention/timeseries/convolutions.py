r"""Features of time series from random convolutions, as in ROCKET (Dempster et al., 2020).

A convolution mixes the channels at random, then has random taps that sum to zero, at one of the
dilations 1, 2, 4, ..., on the series or on its differences. What it gives is compared with some of
its own quantiles $q$ and pooled over time: the fraction of steps above $q$, the mean excess over
$q$, and the mean place of the steps above. Nothing is trained but the quantiles and the scale.

Letters: B cases, C channels, N steps, K convolutions of a block, F features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = 9
QUANTILES = 2
POOLED = 3  # numbers for each quantile
MOST_VALUES = 2**28  # of the features of all cases that a machine is fitted on
_AT_A_TIME = 2**20  # values of a batch
_SEEN = 64  # cases that give quantiles


@dataclass(frozen=True, eq=False)
class RandomConvolutions:
    """Blocks of convolutions, one for each dilation of the series, then of its differences."""

    mixing: Tensor  # [blocks, K, C]
    taps: Tensor  # [blocks, K, TAPS]
    quantiles: Tensor  # [blocks, QUANTILES, K]
    mean: Tensor  # [F]
    inverse_std: Tensor  # [F], 0 where the feature is constant

    @classmethod
    def fit(
        cls, x: Tensor, token_mask: Tensor, num_features: int, generator: torch.Generator
    ) -> tuple[RandomConvolutions, Tensor]:
        """Draw convolutions; return them with the features [B, F] of the cases.

        Args:
            x: Series [B, N, C], standardised, zero at padding.
            token_mask: True at real steps, [B, N].
            num_features: About as many; fewer where the cases are many.
            generator: Of all that is drawn, on the CPU.
        """
        cases, N, C = x.shape
        dilations = 1 + max(0, int(math.log2(max(N - 1, 1) / (TAPS - 1))))
        num_features = min(num_features, MOST_VALUES // cases)
        K = max(1, num_features // (2 * dilations * QUANTILES * POOLED))
        shape = (2 * dilations, K)
        taps = torch.randn(*shape, TAPS, generator=generator)
        taps -= taps.mean(-1, keepdim=True)
        drawn = cls(
            _mixing(shape, C, generator).to(x.device),
            F.normalize(taps, dim=-1).to(x.device),
            *(torch.zeros(0, device=x.device) for _ in range(3)),
        )
        seen = torch.randperm(cases, generator=generator)[:_SEEN].to(x.device)
        levels = (torch.arange(QUANTILES) + torch.rand(*shape, QUANTILES, generator=generator)) / (
            QUANTILES
        )
        quantiles = [
            _quantiles_of(outputs, token_mask[seen], each.to(x.device))
            for outputs, each in zip(drawn._outputs(x[seen], token_mask[seen]), levels, strict=True)
        ]
        drawn = replace(drawn, quantiles=torch.stack(quantiles))
        features = drawn._pooled(x, token_mask)
        std, mean = torch.std_mean(features, 0, correction=0)
        inverse_std = torch.where(std > 1e-6, 1 / std.clamp(min=1e-6), 0)
        features -= mean
        features *= inverse_std
        return replace(drawn, mean=mean, inverse_std=inverse_std), features

    def __call__(self, x: Tensor, token_mask: Tensor) -> Tensor:
        """Compute the features [B, F] of series."""
        return (self._pooled(x, token_mask) - self.mean) * self.inverse_std

    def to(self, device: str | torch.device) -> RandomConvolutions:
        """Move to another device."""
        return RandomConvolutions(**{name: each.to(device) for name, each in vars(self).items()})

    def _pooled(self, x: Tensor, token_mask: Tensor) -> Tensor:
        K, N, C = self.mixing.shape[1], *x.shape[1:]
        size = max(1, _AT_A_TIME // (N * max(K, C)))
        batches = zip(torch.split(x, size), torch.split(token_mask, size), strict=True)
        return torch.cat([self._pooled_batch(*batch) for batch in batches])

    def _pooled_batch(self, x: Tensor, token_mask: Tensor) -> Tensor:
        N = x.shape[1]
        places = torch.linspace(0, 1, N, device=x.device)
        weights = torch.stack([torch.ones_like(places), places], -1)
        steps = token_mask.sum(1).clamp(min=1)[:, None]
        pooled = []
        for outputs, quantiles in zip(self._outputs(x, token_mask), self.quantiles, strict=True):
            for each in quantiles:
                excess = (outputs - each[:, None]).clamp_(min=0)  # 0 at padding
                total = excess.sum(-1)
                count, place = (excess.sign_() @ weights).unbind(-1)
                pooled += [count / steps, total / count.clamp(min=1), place / count.clamp(min=1)]
        return torch.cat(pooled, 1)

    def _outputs(self, x: Tensor, token_mask: Tensor) -> Iterator[Tensor]:
        """Yield the outputs [B, K, N] of each block; what stands at padding is below all others."""
        x = x.mT
        differences = F.pad(x.diff(dim=-1), (1, 0)) * token_mask[:, None]
        half = len(self.taps) // 2
        padding = None if token_mask.all() else ~token_mask[:, None]
        for block, (mixing, taps) in enumerate(zip(self.mixing, self.taps, strict=True)):
            dilation = 2 ** (block % half)
            mixed = mixing @ (x if block < half else differences)
            outputs = F.conv1d(
                mixed,
                taps[:, None],
                padding=dilation * (TAPS // 2),
                dilation=dilation,
                groups=len(taps),
            )
            if padding is not None:
                outputs = outputs.masked_fill(padding, torch.finfo(outputs.dtype).min)
            yield outputs


def _mixing(shape: tuple[int, ...], C: int, generator: torch.Generator) -> Tensor:
    """Draw normal weights of 1 to C channels, [*shape, C]; the number is log-uniform."""
    number = (C + 1) ** torch.rand(*shape, 1, generator=generator)
    rank = torch.rand(*shape, C, generator=generator).argsort(-1).argsort(-1)
    weights = torch.randn(*shape, C, generator=generator)
    return F.normalize(torch.where(rank < number.floor().clamp(max=C), weights, 0), dim=-1)


def _quantiles_of(outputs: Tensor, token_mask: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles of all real outputs of each convolution, [QUANTILES, K]."""
    real = outputs.movedim(1, 0)[:, token_mask].sort(-1).values  # [K, steps]
    return real.gather(1, (levels * (real.shape[1] - 1)).long()).mT.contiguous()
