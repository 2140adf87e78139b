r"""Positions of tokens: rotary ones, and the learned time of a kernel with a decay.

The kernel of a layer with a decay is $e^{-|a_i - a_j|} \phi_q(x_i)^\top \phi_k(x_j)$ with the time
$a_i = \sum_{t \le i} \delta_t$. A step $\delta$ leaves what came before with the share
$e^{-\delta} = \sigma(z)$: of a learned time z is a projection of the token, of a fixed one a
parameter of the head.

Letters: B batch, N tokens, D model dim, H heads, C head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.inputs import outputs_of
from primal_attention.attention.base.validation import check_choice
from primal_attention.ops.causal import token_counts
from primal_attention.precision import accumulate, without_autocast

ROTARY_BASE = 10_000.0
_EPS = 1e-6  # beside the mean square that a norm divides by


def check_rotary(head_dim: int) -> None:
    """Raise unless heads of this size have pairs of channels to turn."""
    if head_dim % 2:
        raise ValueError(f"rotary=True needs an even head dimension, got {head_dim}")


def rotary_positions(x: Tensor, token_mask: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Positions [B, N] of the real tokens of x [B, N, ...], counted from 0 or from ``before``."""
    return token_counts(x, token_mask, before) - 1


def rotated(z: Tensor, positions: Tensor) -> Tensor:
    """Turn z [B, N, H, C]: channels c and c + C/2 are a pair, of frequency BASE^(-2 c / C)."""
    rows = accumulate(z)
    half = z.shape[-1] // 2
    channels = torch.arange(half, device=z.device, dtype=rows.dtype)
    angles = positions[:, :, None, None].to(rows.dtype) * ROTARY_BASE ** (-channels / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = rows[..., :half], rows[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(z.dtype)


class TimeProjection(nn.Linear):
    """The logit of the share that each head keeps at a token; it starts near 0.98."""

    def reset_parameters(self) -> None:
        """Draw the weight as any linear layer does, and start the bias at 4."""
        super().reset_parameters()
        nn.init.constant_(self.bias, 4.0)


class TimedLayer(nn.Module):
    """A layer whose heads may have a time: ``raw_decay`` of a fixed one, or ``decay_proj``."""

    decay: str | None = None
    raw_decay: nn.Parameter
    decay_proj: TimeProjection

    def add_time(self, decay: str | None, dim: int, num_heads: int, *, normalised: bool) -> None:
        """Check the decay and make its parameters, beside a feature map normalised or not."""
        if decay is not None:
            check_choice("decay", decay, ("fixed", "learned"))
        if decay is not None and normalised:
            raise ValueError(
                f"decay={decay!r} does not go with a normalised feature_map, whose normaliser "
                f"knows no time; use feature_map='unit_elu' or another name"
            )
        self.decay = decay
        if decay == "learned":
            self.decay_proj = TimeProjection(dim, num_heads)
        elif decay == "fixed":
            self.raw_decay = nn.Parameter(torch.empty(num_heads))

    def check_no_context(self) -> None:
        """Raise where a context was given along with a decay."""
        if self.decay is not None:
            raise ValueError(
                f"a context does not go with decay={self.decay!r}: its tokens have no time in "
                f"common with those of x"
            )

    def reset_time(self) -> None:
        """Start the shares that heads with a fixed decay keep between 0.88 and 0.998."""
        if self.decay == "fixed":
            with torch.no_grad():
                self.raw_decay.copy_(torch.linspace(2.0, 6.0, len(self.raw_decay)))

    def time_steps(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return how much time passes at tokens x [B, N, D], [B, N, H]: none at padding."""
        if self.decay is None:
            return None
        if self.decay == "fixed":
            logits = self.raw_decay.expand(*x.shape[:2], -1)
        else:  # rounded to bfloat16, long half-lives would be far off
            with without_autocast(x.device):
                logits = self.decay_proj(x.to(outputs_of(self.decay_proj).dtype))
        steps = F.softplus(-accumulate(logits))
        return steps if mask is None else torch.where(mask[:, :, None], steps, 0.0)


def rms_normed(rows: Tensor, gain: Tensor) -> Tensor:
    """Divide rows by the root of their mean square, times a gain, in at least float32."""
    rows = accumulate(rows)
    return rows * (rows.square().mean(-1, keepdim=True) + _EPS).rsqrt() * gain.to(rows.dtype)
