"""The causal scan spelled out with the N x N matrix of kernel values.

Letters: B batch, N tokens, H heads, C head dim, P features, S dual variables, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import masked
from primal_attention.precision import accumulate, exact


class ScanResult(NamedTuple):
    """Outputs of all tokens and the state after the last one."""

    out: Tensor  # [B, N, H, V], accumulation dtype
    state: Tensor  # [B, H, P, V], accumulation dtype


@exact
def scan(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
    values: Tensor,  # [B, N, H, V], or [B, N, H, S] with a value map
    value_map: Tensor | None = None,  # [S, V]
    state: Tensor | None = None,  # [B, H, P, V]: the sum over earlier tokens
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ScanResult:
    r"""What each token reads: $y_t = \phi_q(q_t)^\top S_t$, in the accumulation dtype.

    $S_t = S_0 + \sum_{\tau \le t} \phi_k(k_\tau) v_\tau^\top$ grows with t, hence the dtype. The
    values are mapped, $v = C^\top h$, where a value map is given. Padded tokens add nothing to the
    state and read zero.
    """
    phi_q = masked(FIXED_MAPS[map_q].forward(accumulate(q)), token_mask)
    phi_k = masked(FIXED_MAPS[map_k].forward(accumulate(k)), token_mask)
    values = masked(accumulate(values), token_mask)
    if value_map is not None:
        values = values @ accumulate(value_map)
    kernel_matrix = einsum(phi_q, phi_k, "b n h p, b m h p -> b h n m").tril()
    out = einsum(kernel_matrix, values, "b h n m, b m h v -> b n h v")
    final = einsum(phi_k, values, "b n h p, b n h v -> b h p v")
    if state is not None:
        out = out + einsum(phi_q, state, "b n h p, b h p v -> b n h v")
        final = final + state
    return ScanResult(out, final)
