r"""Convolution along the tokens as a product with a banded matrix.

$y_i = \sum_k w_k\, x_{i + k - (K - 1) / 2}$ for all tokens of a block is a product of a matrix with
w along its diagonals and of the tokens around the block. The products and their gradients have the
sizes that matrix units are made for, and their sums come in a fixed order.

Letters: B batch, N tokens, H heads, C head dim, K taps, L tokens of a block, W of its window.
"""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from primal_attention.precision import accumulate

_WINDOW = 128  # tokens, at least


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """The tokens x [B, N, H, C] filtered by the taps [H, K] of each head; K is odd.

    Beyond the first and the last token there are zeros.
    """
    (B, N), K = x.shape[:2], taps.shape[1]
    window = _window(K)
    block = window - K + 1
    num_blocks = -(-N // block)
    before, after = K // 2, num_blocks * block - N + K // 2
    windows = F.pad(x, (0, 0, 0, 0, before, after)).unfold(1, window, block)  # [B, N/L, H, C, W]
    matrices = band(accumulate(taps), block).expand(B, -1, -1, -1).to(x.dtype)  # summed back wide
    product = matrices @ rearrange(windows, "b n h c w -> b h w (n c)")
    return rearrange(product, "b h l (n c) -> b (n l) h c", n=num_blocks)[:, :N]


def band(taps: Tensor, num_rows: int) -> Tensor:
    """Matrices [H, L, L + K - 1] whose row i has the taps [H, K] from column i on."""
    H, K = taps.shape
    width = num_rows + K - 1
    # Rows that are one longer than those of the result: each starts one column further there.
    rows = F.pad(taps, (0, num_rows)).repeat(1, num_rows)
    return rows[:, : num_rows * width].view(H, num_rows, width)


def _window(num_taps: int) -> int:
    """A power of two, of which at most a third is read for the neighbours of a block."""
    return max(_WINDOW, 1 << (3 * num_taps - 1).bit_length())
