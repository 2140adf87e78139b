"""Tokens and their positions as vectors.

Letters: B batch, N tokens, D model dim, C channels.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.shards import Sharded
from primal_attention.attention.base.validation import check_sizes


class Embedding(Sharded):
    """Tokens and their positions as vectors [B, N, D].

    Args:
        dim: Model dimension D.
        num_tokens: The longest sequence; as many positions are learnt, over the stride.
        num_channels: Channels C of tokens that are vectors; a linear map reads them.
        kernel_size: Number of neighbouring vectors that the map reads; odd.
        stride: Every so many vectors become one token.
        num_filters: Read samples of sound by a learnt filterbank with so many filters, see
            :class:`Filterbank`; 0: by a linear map.
        vocab_size: Number of symbols, of tokens that are symbols.
        init_range: Positions start uniform in plus or minus this.
    """

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        num_channels: int | None = None,
        kernel_size: int = 1,
        stride: int = 1,
        num_filters: int = 0,
        vocab_size: int | None = None,
        init_range: float = 0.02,
    ):
        check_sizes(
            dim=dim,
            num_tokens=num_tokens,
            num_channels=num_channels,
            vocab_size=vocab_size,
            stride=stride,
        )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd and positive, got {kernel_size}")
        if (num_channels is None) == (vocab_size is None):
            raise ValueError(
                "give num_channels (tokens are vectors) or vocab_size (tokens are symbols), "
                f"got {num_channels=}, {vocab_size=}"
            )
        if stride > 1 and num_channels is None:
            raise ValueError(f"stride={stride} is of vectors; symbols are tokens one by one")
        if num_filters and num_channels != 1:
            raise ValueError(f"num_filters={num_filters} are of one channel, got {num_channels=}")
        super().__init__()
        self.num_channels, self.stride = num_channels, stride
        self.scale = 1.0 if num_filters else math.sqrt(dim)
        self.reads_neighbours = kernel_size > 1 or stride > 1
        if vocab_size is not None:
            self.tokens: nn.Module = nn.Embedding(vocab_size, dim)
            nn.init.normal_(self.tokens.weight, std=0.02)
        elif num_filters:
            self.tokens = Filterbank(num_filters, kernel_size, stride, dim)
        elif num_channels is not None:
            pointwise = kernel_size == stride == 1
            linear = nn.Linear if pointwise else partial(_Convolution, kernel_size, stride)
            self.tokens = linear(num_channels, dim)
        self.positions = nn.Parameter(
            torch.empty(-(-num_tokens // stride), dim).uniform_(-init_range, init_range)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embed x, [B, N, C] of vectors or [B, N] of symbols, of any integer type."""
        self._check(x)
        if self.num_channels is None:  # a table cannot be read with every integer type
            embedded = self.tokens(x.int() if x.element_size() < 4 else x)
        else:
            embedded = self.tokens(x) * self.scale
        if self.shard is None:
            positions = self.positions[: embedded.shape[1]]
        else:
            places = torch.arange(x.shape[1], device=x.device)
            positions = self.positions[places + self.shard.before(places[-1] + 1)]
        y: Tensor = embedded + positions
        return y

    def needs_whole(self) -> str | None:
        """Say why sequences cannot be sharded; None where they can."""
        return "it reads neighbours, so kernel_size must be 1" if self.reads_neighbours else None

    def _check(self, x: Tensor) -> None:
        if self.num_channels is None:
            check_symbols("x", x)
        elif x.dim() != 3 or x.shape[-1] != self.num_channels:
            raise ValueError(f"x must be [batch, tokens, {self.num_channels}], got {list(x.shape)}")
        N, longest = x.shape[1], len(self.positions) * self.stride
        if longest < N:
            raise ValueError(f"x has {N} tokens; the model has positions for {longest}")


def check_symbols(name: str, ids: Tensor) -> None:
    """Raise unless the ids are integers [B, N]."""
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(
            f"{name} must be integers [batch, tokens], got {ids.dtype} {list(ids.shape)}"
        )


class _Convolution(nn.Module):
    """A linear map of vectors and their neighbours; beyond the ends there are zeros."""

    def __init__(self, kernel_size: int, stride: int, num_channels: int, dim: int):
        super().__init__()
        self.conv = nn.Conv1d(num_channels, dim, kernel_size, stride, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.mT).mT
        return y


class Filterbank(nn.Module):
    """Energies of learnt filters on a logarithmic scale, and two convolutions of them.

    The filters f_i are complex, their energies log(1 + 100 mean |f_i * x|^2), with means over two
    tokens. They start at frequencies that are equidistant on the mel scale of 8,000 samples a
    second, under Hann windows whose bandwidth is that distance. Zeros stand beyond the ends.

    Args:
        num_filters: Filters F.
        kernel_size: Samples that a filter reads; odd.
        stride: Samples from one token to the next.
        dim: Model dimension D.
    """

    def __init__(self, num_filters: int, kernel_size: int, stride: int, dim: int):
        super().__init__()
        self.stride, self.steps = stride, math.gcd(stride, 4)  # energies for each token
        mel = math.log1p(4000 / 700) / (num_filters + 1)  # the distance
        cycles = 700 / 8000 * torch.expm1(mel * torch.arange(1, num_filters + 1))[:, None]
        distance = mel * (cycles + 700 / 8000)
        places = torch.arange(kernel_size) - kernel_size // 2
        phases, lag = 2 * math.pi * cycles * places, (distance * places).clamp(-0.5, 0.5)
        windows = (math.pi * lag).cos().square()
        windows = windows / windows.norm(dim=1, keepdim=True)
        waves = torch.cat([windows * phases.cos(), windows * phases.sin()])
        self.filters = nn.Parameter(waves[:, None])
        self.inner = nn.Conv1d(num_filters, dim, 5)
        self.outer = nn.Conv1d(dim, dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [B, N / stride, D] of samples [B, N, 1]."""
        tokens, size = -(-x.shape[1] // self.stride), self.filters.shape[-1]
        hop = self.stride // self.steps
        #   Both convolutions read four more tokens on each side; a mean reads two tokens.
        left = 4 * self.stride + self.stride // 2 + size // 2
        length = ((tokens + 9) * self.steps - 1) * hop + size
        x = F.pad(x.mT, (left, length - left - x.shape[1]))
        real, imaginary = F.conv1d(x, self.filters, stride=hop).chunk(2, 1)
        power = real.square() + imaginary.square()
        energies = (100 * F.avg_pool1d(power, 2 * self.steps, self.steps)).log1p()
        y: Tensor = self.outer(F.gelu(self.inner(energies))).mT
        return y
