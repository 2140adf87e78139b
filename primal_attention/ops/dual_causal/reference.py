"""Causal Primal-Attention with dual weights, spelled out with the N x N matrix of kernel values.

Letters: B batch, N tokens, H heads, C head dim, P features, S directions, V outputs of a head.
"""

from __future__ import annotations

from typing import NamedTuple

from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import masked
from primal_attention.precision import accumulate, exact


class DualCausalResult(NamedTuple):
    """Outputs of all tokens, and sums over the real ones; all but the outputs accumulated."""

    out: Tensor  # [B, N, H, V], the dtype of q
    q_side: Tensor  # [B, H, P, S]: sum of phi_q h_e^T after the last token
    k_side: Tensor  # [B, H, P, S]: sum of phi_k h_r^T
    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over these tokens; empty unless wanted
    gram_k: Tensor


@exact
def dual_causal_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,
    h: Tensor,  # [B, N, 2, H, S]: h_e and h_r
    c_e: Tensor | None,  # [S, V]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    bias: Tensor | None,  # [V]
    q_before: Tensor | None,  # [B, H, P, S]: the sum of phi_q h_e^T over earlier tokens
    k_before: Tensor | None,
    *,
    counts: Tensor,  # [B, N]: real tokens up to each
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
    grams: bool = True,
) -> DualCausalResult:
    r"""$o_t = C_e^\top e_t + C_r^\top r_t + b$, zero at padded tokens.

    The scores are means over the n real tokens up to t,
    $e_t = \frac{1}{n} \sum_{\tau \le t} h_{r,\tau}\, \phi_{k,\tau}^\top \phi_{q,t}$ and
    $r_t = \frac{1}{n} \sum_{\tau \le t} h_{e,\tau}\, \phi_{q,\tau}^\top \phi_{k,t}$.
    """
    phi_q = masked(FIXED_MAPS[map_q].forward(accumulate(q)), token_mask)
    phi_k = masked(FIXED_MAPS[map_k].forward(accumulate(k)), token_mask)
    h_e, h_r = (masked(part, token_mask) for part in accumulate(h).unbind(2))
    share = 1 / accumulate(counts.to(q.dtype)).clamp(min=1)[:, :, None, None]
    read_e = _read(phi_q, phi_k, h_r, k_before) * share
    read_r = _read(phi_k, phi_q, h_e, q_before) * share
    pairs = [(read, c) for read, c in ((read_e, c_e), (read_r, c_r)) if c is not None]
    out = sum(read @ accumulate(c) for read, c in pairs)
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + accumulate(bias)
    gram_q, gram_k = (_moment(phi, phi) if grams else phi.new_empty(0) for phi in (phi_q, phi_k))
    return DualCausalResult(
        masked(out, token_mask).to(q.dtype),
        _moment(phi_q, h_e, q_before),
        _moment(phi_k, h_r, k_before),
        gram_q,
        gram_k,
    )


def _read(near: Tensor, far: Tensor, h: Tensor, before: Tensor | None) -> Tensor:
    kernel_matrix = einsum(near, far, "b n h p, b m h p -> b h n m").tril()
    read = einsum(kernel_matrix, h, "b h n m, b m h s -> b n h s")
    if before is not None:
        read = read + einsum(near, accumulate(before), "b n h p, b h p s -> b n h s")
    return read


def _moment(phi: Tensor, values: Tensor, before: Tensor | None = None) -> Tensor:
    total = einsum(phi, values, "b n h p, b n h s -> b h p s")
    return total if before is None else total + before
