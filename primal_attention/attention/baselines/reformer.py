r"""Reformer attention: softmax over the tokens that hash to the same bucket.

Letters: B batch, N tokens (a multiple of m), H heads, R hash rounds, C head dim, K rotated
directions, m tokens of a chunk.
"""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.qkv import Options, SharedQKAttention
from primal_attention.attention.base.validation import check_sizes
from primal_attention.feature_maps import cosine
from primal_attention.ops.op import is_exporting
from primal_attention.precision import accumulate, exact

_SELF = -1e30  # the score of a token with itself: it counts only where no other is seen
_NOWHERE = -1  # the bucket of the chunk before the first
_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of the products with directions at once


class ReformerAttention(SharedQKAttention):
    r"""Attention by locality-sensitive hashing, Kitaev et al. 2020, section 2 and appendix A.

    Keys are unit queries, $k_j = q_j / |q_j|$. Round r hashes $q$ to
    $h_r(q) = \arg\max [q R_r; -q R_r]$, sorts the tokens by (bucket, position), cuts the sorted
    sequence into chunks of m, and lets each token see $P_i^{(r)}$: the tokens of its bucket in its
    own chunk and in the one before. With $N_{ij}$ the number of rounds in which i sees j,

    $o_i = \sum_r e^{z_i^{(r)} - z_i} o_i^{(r)}$,
    $z_i^{(r)} = \log \sum_{j \in P_i^{(r)}} e^{q_i^\top k_j / \sqrt C} / N_{ij}$,
    $z_i = \log \sum_r e^{z_i^{(r)}}$,

    that is softmax over the union of the rounds. A token sees itself only where it sees no other.
    Up to ``bucket_size`` tokens the attention is exact. There is no ``k_proj``, and no
    cross-attention, since the two sides must hash alike.

    A sequence of n real tokens has $2 \lceil n / m \rceil$ buckets, of m / 2 tokens on average, as
    published, but no more than one of ``max_tokens`` has.

    Difference from the paper where causal: there the chunks, and with them what a token sees,
    depend on the tokens after it. Here it sees the m tokens of its bucket before it, a subset; the
    number of buckets is that of ``max_tokens``; and the first m tokens see all before them.

    Args:
        num_hashes: Hash rounds R.
        bucket_size: Length m of the chunks.
        max_tokens: The length for which there are buckets enough; longer inputs have fuller ones.
        **options: Those of :class:`QKVAttention`.

    Rotations are drawn for each forward pass in training; in evaluation they are those of the
    buffer ``rotations``.
    """

    mechanism = Mechanism("Kitaev et al., 2020", "N log N", causal=True, needs_max_tokens=True)
    shown = ("num_hashes", "bucket_size")
    rotations: Tensor  # [H, R, C, K]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_hashes: int = 2,
        bucket_size: int = 64,
        max_tokens: int = 1024,
        **options: Unpack[Options],
    ):
        check_sizes(num_hashes=num_hashes, bucket_size=bucket_size, max_tokens=max_tokens)
        super().__init__(dim, num_heads, **options)
        self.num_hashes, self.bucket_size = num_hashes, bucket_size
        directions = -(-max_tokens // bucket_size)
        shape = (num_heads, num_hashes, self.head_dim, directions)
        self.register_buffer("rotations", torch.randn(shape))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Pack the real tokens, attend, and unpack."""
        order = token_order(q, mask)
        q, v = (order.pack(z).transpose(1, 2) for z in (q, v))  # [B, H, N, C]
        m = self.bucket_size
        out = _attend_all(q[:, :, :m], v[:, :, :m], order.num_real, causal=self.causal)
        if q.shape[2] > m:
            hashed = self._attend_hashed(q, v, order.num_real)
            if not self.causal:  # where it is, the first m do not know how many follow
                short = (order.num_real <= m)[:, None, None, None]
                out = torch.where(short, out, hashed[:, :, :m])
            out = torch.cat([out, hashed[:, :, m:]], dim=2)
        return order.unpack(out.transpose(1, 2))

    def _attend_hashed(self, q: Tensor, v: Tensor, num_real: Tensor) -> Tensor:
        N, m = q.shape[2], self.bucket_size
        q, v = (F.pad(z, (0, 0, 0, -N % m)) for z in (q, v))
        rotations = torch.randn_like(self.rotations) if self.training else self.rotations
        most = rotations.shape[-1]
        directions = torch.full_like(num_real, most)
        if not self.causal:
            directions = torch.minimum(directions, (num_real + m - 1) // m)
            most = min(most, q.shape[2] // m)
        buckets: Tensor = _buckets(q.detach(), rotations, num_real, directions, most)
        return _attend_buckets(q, v, buckets, m, causal=self.causal)[:, :, :N]


@exact
def nearest_directions(
    q: Tensor,  # [B, H, N, C]
    rotations: Tensor,  # [H, R, C, K]
    num_real: Tensor,  # [B]
    directions: Tensor,  # [B]: how many of the K each sequence has
) -> Tensor:
    """Return the bucket of each token in each round, [B, H, R, N]; 2K, the last, at padding."""
    N, K = q.shape[2], rotations.shape[-1]
    q = accumulate(q)
    rotated = einsum(q, rotations.to(q.dtype), "b h n c, h r c k -> b h r n k")
    used = torch.arange(K, device=q.device) < directions[:, None]
    size = torch.where(used[:, None, None, None], rotated.abs(), -1.0)
    nearest = size.argmax(-1, keepdim=True)
    opposite = rotated.gather(-1, nearest) < 0
    bucket = (nearest + K * opposite).squeeze(-1)
    real = torch.arange(N, device=q.device) < num_real[:, None]
    return torch.where(real[:, None, None], bucket, 2 * K)


def _buckets(
    q: Tensor, rotations: Tensor, num_real: Tensor, directions: Tensor, most: int
) -> Tensor:
    """The buckets, of some tokens at a time: the products with all directions are never whole.

    Leaving out directions that no sequence has changes the numbers of buckets, not their order.
    """
    rotations = rotations[..., :most]
    (B, H, N, _), R = q.shape, rotations.shape[1]
    if is_exporting():  # a graph that has any length
        return nearest_directions(q, rotations, num_real, directions)
    size = max(1, _ELEMENTS.get(q.device.type, _ELEMENTS["cuda"]) // max(B * H * R * most, 1))
    chunks = []
    for start in range(0, N, size):
        left = (num_real - start).clamp(min=0)  # of the real tokens, from the chunk on
        given = q[:, :, start : start + size], rotations, left, directions
        chunks.append(nearest_directions(*given))
    return torch.cat(chunks, -1)


def _attend_all(q: Tensor, v: Tensor, num_real: Tensor, *, causal: bool) -> Tensor:
    """Shared-QK softmax attention over all real tokens, [B, H, N, C]."""
    place = torch.arange(q.shape[2], device=q.device)
    seen = (place < num_real[:, None])[:, None, None]
    if causal:
        seen = seen & (place < place[:, None])
    return _softmax(q, _unit(q), v, seen, place[:, None] == place)[0]


def _attend_buckets(q: Tensor, v: Tensor, buckets: Tensor, m: int, *, causal: bool) -> Tensor:
    """Attention inside the buckets of all rounds, which make one softmax; [B, H, N, C]."""
    order = buckets.argsort(dim=-1, stable=True)  # [B, H, R, N]: the token in each slot
    slots = order.argsort(dim=-1)  # the slot of each token
    seen, counts = _visible(buckets, slots, order, m, causal=causal)
    token = _chunked(order[..., None], m)
    is_self = token.queries == token.keys.mT
    q, v = (_taken(z[:, :, None], order) for z in (q, v))  # [B, H, R, N, C]
    queries, keys, values = _chunked(q, m).queries, _chunked(_unit(q), m).keys, _chunked(v, m).keys
    rounds = _softmax(queries, keys, values, seen, is_self, counts)
    out, z = (_taken(x.flatten(3, 4), slots) for x in rounds)
    return (z.softmax(2).to(out.dtype) * out).sum(2)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of x [B, H, R or 1, N, C] at the positions index [B, H, R, N]."""
    shape = (*index.shape, x.shape[-1])
    return x.expand(shape).gather(3, index[..., None].expand(shape))


class _Chunks(NamedTuple):
    """The slots as queries, and as keys together with the chunk before, which may be missing."""

    queries: Tensor  # [B, H, R, N / m, m, C]
    keys: Tensor  # [B, H, R, N / m, 2m, C]


def _chunked(x: Tensor, m: int) -> _Chunks:
    own = rearrange(x, "b h r (n m) c -> b h r n m c", m=m)
    before = F.pad(own[:, :, :, :-1], (0, 0, 0, 0, 1, 0), value=_NOWHERE)
    return _Chunks(own, torch.cat([before, own], dim=4))


def _visible(
    buckets: Tensor, slots: Tensor, order: Tensor, m: int, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Tell the keys that each query sees in each round, and in how many rounds it does."""
    places, reach = (slots, m) if causal else (slots // m, 1)
    seen, counts = [], torch.zeros((), dtype=torch.int32, device=order.device)
    for r in range(order.shape[2]):
        bucket, place = (
            _chunked(_taken(x[:, :, r, None, :, None].int(), order), m) for x in (buckets, places)
        )
        distance = place.queries - place.keys.mT
        together = bucket.queries == bucket.keys.mT
        visible = together & (distance >= 0) & (distance <= reach)
        seen.append(visible[:, :, r])
        counts = counts + visible
    return torch.stack(seen, dim=2), counts


@exact
def _softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, is_self: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over the seen keys, or the token itself if there is none, and its log-normaliser."""
    scores = accumulate(q @ k.mT) * q.shape[-1] ** -0.5
    if counts is not None:
        scores = scores - counts.clamp(min=1).to(scores.dtype).log()
    scores = torch.where(seen, scores, -torch.inf)
    scores = torch.where(is_self, _SELF, scores)
    z = scores.logsumexp(-1, keepdim=True)
    return (scores - z).exp().to(v.dtype) @ v, z


@exact
def _unit(q: Tensor) -> Tensor:
    """The keys q / |q|."""
    return cosine(accumulate(q)).to(q.dtype)
