"""The KSVD objective spelled out.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from primal_attention.precision import exact


@exact
def ksvd_objective(
    gram_q: Tensor,  # [B, H, P, P] = Phi_q^T Phi_q
    gram_k: Tensor,  # [B, H, P, P]
    w_e_given_x: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor,
    lambda_diag: Tensor,  # [H, S]
    trace: Tensor | None,  # [H]; None: that of the weights given X
    num_queries: Tensor,  # [B]: tokens behind gram_q
    num_keys: Tensor,  # [B]: tokens behind gram_k
    *,
    averaged: bool = True,
    lambda_squared: bool = False,
    squared: bool = True,
) -> Tensor:
    r"""The mean of $J^2$, or of J, over the sequences with a token on either side.

    $J = \frac12 Tr(\Lambda W_{e|X}^\top G_q W_{e|X}) + \frac12 Tr(\Lambda W_{r|X}^\top G_k W_{r|X})
    - Tr(W_e^\top W_r)$ of eq. (11), the mean over the heads. The first two terms are means over the
    tokens where ``averaged``, else sums; ``lambda_squared`` puts the square of Lambda in its place.
    """
    return objective_of_energies(
        energies(gram_q, w_e_given_x),
        energies(gram_k, w_r_given_x),
        w_e_given_x,
        w_r_given_x,
        lambda_diag,
        trace,
        num_queries,
        num_keys,
        averaged=averaged,
        lambda_squared=lambda_squared,
        squared=squared,
    )


@exact
def objective_of_energies(
    energies_e: Tensor,  # [B, H, S]: sums of e^2 over the tokens
    energies_r: Tensor,
    w_e_given_x: Tensor,
    w_r_given_x: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    num_queries: Tensor,
    num_keys: Tensor,
    *,
    averaged: bool = True,
    lambda_squared: bool = False,
    squared: bool = True,
) -> Tensor:
    """The same from the sums of the squares of the scores."""
    diagonal = lambda_diag.square() if lambda_squared else lambda_diag
    e_term = einsum(diagonal, energies_e, "h s, b h s -> b h") / 2
    r_term = einsum(diagonal, energies_r, "h s, b h s -> b h") / 2
    if averaged:
        e_term = e_term / num_queries.clamp(min=1)[:, None]
        r_term = r_term / num_keys.clamp(min=1)[:, None]
    if trace is None:
        trace = (w_e_given_x * w_r_given_x).sum((-2, -1))
    j = (e_term + r_term - trace).mean(-1)
    return mean_over_sequences(j.square() if squared else j, num_queries, num_keys)


def energies(gram: Tensor, weights: Tensor) -> Tensor:
    """sum_i e_i^2 for each direction, diag(W^T G W), [B, H, S]."""
    return (weights * (gram @ weights)).sum(-2)


def mean_over_sequences(values: Tensor, num_queries: Tensor, num_keys: Tensor) -> Tensor:
    """The mean of values [B] over the sequences with a token on either side; zero without any."""
    real = torch.minimum(num_queries, num_keys) > 0
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)
