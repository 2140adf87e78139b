"""What a layer did with one batch: enough to tell its matrices, sequence by sequence.

Padding is taken out before anything is computed, so that it need not even be finite.

Letters: B batch, N queries, T keys, D model dim, H heads, C head dim, P features, S directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from primal_attention.analysis.matrices import HeadMatrices
from primal_attention.analysis.probing import attention_matrix
from primal_attention.attention.base.qkv import QKVAttention


class AttendedSequence(NamedTuple):
    """Queries, keys and values of the real tokens of one sequence, in float64."""

    q: Tensor  # [N, H, C]
    k: Tensor  # [T, H, C]
    v: Tensor  # [T, H, C]


@dataclass(frozen=True)
class AttendedRun:
    """One pass of a mechanism with queries, keys and values."""

    layer: QKVAttention  # in float64
    q: Tensor  # [B, N, H, C]
    k: Tensor  # [B, T, H, C]
    v: Tensor
    mask: Tensor | None  # [B, N], True = real token
    source_mask: Tensor | None  # [B, T]
    crossing: bool

    def sequences(self) -> Iterator[AttendedSequence]:
        """Those that have a query and a key."""
        for b in range(len(self.q)):
            q = real(self.q, self.mask, b)
            k, v = (real(z, self.source_mask, b) for z in (self.k, self.v))
            if len(q) and len(k):
                yield AttendedSequence(q.double(), k.double(), v.double())

    def matrices(self) -> Iterator[HeadMatrices]:
        """The attention matrices of each sequence."""
        for sequence in self.sequences():
            yield self.matrix(sequence)

    def matrix(self, sequence: AttendedSequence) -> HeadMatrices:
        """The attention matrices of one sequence."""
        q, k, v = sequence

        def attend(values: Tensor) -> Tensor:
            out = self.layer.attend(q[None], k[None], values.transpose(0, 1)[None], None, None)
            return out[0].transpose(0, 1)

        bound = self.layer.mechanism.largest_rank(self.layer)
        return attention_matrix(attend, v.transpose(0, 1), len(q), bound, crossing=self.crossing)


def real(z: Tensor, mask: Tensor | None, b: int) -> Tensor:
    """The real tokens of sequence b."""
    return z[b] if mask is None else z[b, mask[b].to(z.device)]
