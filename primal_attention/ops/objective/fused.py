"""J from Gram matrices as one fused op."""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.ksvd import ksvd_objective


def fused_mean_j(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e_given_x: Tensor,
    w_r_given_x: Tensor,
    trace: Tensor | None,
    lambda_diag: Tensor,
    num_queries: Tensor,
    num_keys: Tensor,
    *,
    averaged: bool,
    lambda_squared: bool,
    squared: bool,
    half: bool,
) -> Tensor | None:
    """J of eq. (11); None where no backend takes it."""
    if not gram_q.is_cuda:
        return None
    return ksvd_objective(
        gram_q,
        gram_k,
        w_e_given_x,
        w_r_given_x,
        lambda_diag,
        trace,
        num_queries,
        num_keys,
        averaged=averaged,
        lambda_squared=lambda_squared,
        squared=squared,
        half=half,
    )
