"""Series to train on, changed at random each time they are drawn, and goals with weights."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.tasks import Batch, Cases, Goal


@dataclass(frozen=True)
class AugmentedSeries(Cases):
    """Time series ``x`` [B, N, C], standardised, with ``token_mask`` [B, N].

    Args:
        inputs: See above.
        target: [B, K], weighted: mixed series have mixed targets.
        noise: Standard deviation of noise at each step, and of the scale of each channel.
        time_mask: The part of a series that is set to zero, at a random place.
        channel_dropout: Probability with which a channel is set to zero.
        mixup: Parameter of the Beta distribution of the shares of two series in a mixed one.
    """

    noise: float = 0.0
    time_mask: float = 0.0
    channel_dropout: float = 0.0
    mixup: float = 0.0

    def chosen(self, indices: Tensor) -> "AugmentedSeries":
        """Return some of the cases."""
        inputs, target = self[indices]
        return replace(self, inputs=inputs, target=target)

    def drawn(self, indices: Tensor) -> Batch:
        """Select cases to train on, and change them."""
        inputs, target = self[indices]
        x, token_mask = inputs["x"], inputs["token_mask"]
        B, N, C = x.shape
        by_channel = torch.ones_like(x[:, :1])
        if self.noise:
            by_channel = by_channel + self.noise * torch.randn_like(by_channel)
            x = x + self.noise * torch.randn_like(x)
        x = x * F.dropout(by_channel, self.channel_dropout if C > 1 else 0.0)
        if self.time_mask:
            places = torch.arange(N, device=x.device)
            first = torch.randint(N, (B, 1), device=x.device)
            hidden = (places >= first) & (places < first + max(1, round(self.time_mask * N)))
            x = x.masked_fill(hidden[..., None], 0)
        x = x * token_mask[..., None]
        if self.mixup and B > 1:
            beta = torch.full((B, 2), self.mixup, device=x.device)
            share = torch.distributions.Dirichlet(beta).sample().amax(1, keepdim=True)
            other = torch.randperm(B, device=x.device)
            x = torch.lerp(x[other], x, share[..., None])
            target = torch.lerp(target[other], target, share)
            token_mask = token_mask | token_mask[other]
        return Batch({"x": x, "token_mask": token_mask}, target)


def _hits(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(-1) == target.argmax(-1)).to(outputs.dtype)


def _squared_errors(outputs: Tensor, target: Tensor) -> Tensor:
    number, weight = target.unbind(-1)
    return weight * (outputs.squeeze(-1) - number).square()


#   A target is the weighted probability of each class, or a number beside its weight.
CLASSES = Goal(
    partial(F.cross_entropy, reduction="none"),
    _hits,
    "accuracy",
    lambda mean: 100 * mean,
    higher_is_better=True,
)
NUMBERS = Goal(_squared_errors, _squared_errors, "mse", lambda mean: mean, higher_is_better=False)
