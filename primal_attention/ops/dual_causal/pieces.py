"""The tokens of a sequence in pieces, as the op walks over them, and the kernel values inside one.

Letters: B batch, N tokens, H heads, C head dim, P features, S directions, n tokens of a piece.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import head_first, mask_of, slices, zeroed
from primal_attention.precision import accumulation_dtype

PIECE = 128  # tokens: the dense part costs this many times N, the sums once for each piece


class Side(NamedTuple):
    """Queries or keys of one piece, zero at padded tokens."""

    phi: Tensor  # [B, H, n, P]
    h: Tensor  # [B, H, n, S]: their dual variables
    past: Tensor  # [B, H, n, n]: kernel values with the tokens of the other side up to each
    later: Tensor  # and from each on

    def read(self, far: Side, before: Tensor) -> Tensor:
        """Scores times the number of tokens, from the other side and its sum over earlier ones."""
        return self.past @ far.h + self.phi @ before


class Pieces:
    """The sequence, one piece at a time."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        h: Tensor,
        counts: Tensor,
        token_mask: Tensor | None,
        maps: tuple[str, str],
    ):
        self.q, self.k, (self.h_e, self.h_r) = q, k, h.unbind(2)
        self.counts, self.token_mask = counts, token_mask
        self.map_q, self.map_k = (FIXED_MAPS[name] for name in maps)
        self.slices = list(slices(q.shape[1], PIECE))

    def zeroed(self, values: Tensor, piece: slice) -> Tensor:
        """Values [B, H, n, C] with zeros at the padded tokens."""
        return zeroed(values, mask_of(self.token_mask, piece))

    def sides(self, piece: slice) -> tuple[Side, Side]:
        """Queries and keys."""
        phi_q = self.zeroed(self.map_q.forward(head_first(self.q, piece)), piece)
        phi_k = self.zeroed(self.map_k.forward(head_first(self.k, piece)), piece)
        h_e, h_r = (self.zeroed(head_first(h, piece), piece) for h in (self.h_e, self.h_r))
        kernel_matrix = phi_q @ phi_k.mT
        lower, upper = kernel_matrix.tril(), kernel_matrix.triu()
        return Side(phi_q, h_e, lower, upper), Side(phi_k, h_r, upper.mT, lower.mT)

    def share(self, piece: slice) -> Tensor:
        """1 / n for the number n of real tokens up to each, [B, 1, n, 1]."""
        counts = self.counts[:, None, piece, None].clamp(min=1)
        return 1 / counts.to(accumulation_dtype(self.q.dtype))

    def pull_back(self, d_phi_q: Tensor, d_phi_k: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """Gradients of q and k, [B, n, H, C]."""
        dq = self.map_q.vjp(head_first(self.q, piece), d_phi_q)
        dk = self.map_k.vjp(head_first(self.k, piece), d_phi_k)
        return self.zeroed(dq, piece).transpose(1, 2), self.zeroed(dk, piece).transpose(1, 2)
