"""A ridge machine on random convolutions: the closed-form part of an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.timeseries.convolutions import RandomConvolutions
from primal_attention.timeseries.ridge import Ridge


class ConvolutionMachine(NamedTuple):
    """Random convolutions, and the ridge machine that is fitted on what they give."""

    convolutions: RandomConvolutions
    ridge: Ridge

    @classmethod
    def fit(
        cls,
        inputs: Mapping[str, Tensor],
        targets: Tensor,
        sample_weight: Tensor,
        *,
        num_features: int,
        seed: int,
    ) -> tuple[ConvolutionMachine, Tensor]:
        """Fit series to targets [n, K]; return the machine with predictions left one out."""
        generator = torch.Generator().manual_seed(seed)
        convolutions, features = RandomConvolutions.fit(
            inputs["x"], inputs["token_mask"], num_features, generator
        )
        ridge, left_out = Ridge.fit(features, targets, sample_weight)
        return cls(convolutions, ridge), left_out

    def __call__(self, x: Tensor, token_mask: Tensor) -> Tensor:
        """Compute outputs [B, K] of series [B, N, C], in float64."""
        return self.ridge(self.convolutions(x, token_mask))

    def to(self, device: str | torch.device) -> ConvolutionMachine:
        """Move to another device."""
        ridge = Ridge(*(each.to(device) for each in self.ridge))
        return ConvolutionMachine(self.convolutions.to(device), ridge)

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name."""
        return {**vars(self.convolutions), **self.ridge._asdict()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> ConvolutionMachine:
        """Make the machine again whose numbers these are."""
        ridge = Ridge(*(tensors[name] for name in Ridge._fields))
        rest = {name: each for name, each in tensors.items() if name not in Ridge._fields}
        return cls(RandomConvolutions(**rest), ridge)
