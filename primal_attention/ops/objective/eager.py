r"""The KSVD objectives in plain PyTorch, from sums over the tokens alone.

Letters: B batch, H heads, P feature dim, S directions, M landmarks.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class MeanJInputs(NamedTuple):
    """All that J needs where Gram matrices are known."""

    gram_q: Tensor  # [B, H, P, P] = Phi_q^T Phi_q over the real tokens
    gram_k: Tensor
    w_e: Tensor  # W_{e|X}: [B, H, P, S], or [H, P, S] for all sequences
    w_r: Tensor
    trace: Tensor | None  # [H]; None: that of the weights given X
    lambda_diag: Tensor  # [H, S]
    num_queries: Tensor  # [B]: tokens behind gram_q
    num_keys: Tensor  # [B]: tokens behind gram_k
    averaged: bool
    lambda_squared: bool = False
    squared: bool = True
    half: bool = False  # precision of the tokens: products need not hold all digits of float32


def mean_j_of_grams(given: MeanJInputs) -> Tensor:
    """Compute :func:`mean_j` from Gram matrices, in plain PyTorch."""
    sides = (given.gram_q, given.w_e), (given.gram_k, given.w_r)
    energies = [(w * (gram @ w)).sum(-2) for gram, w in sides]
    trace = (given.w_e * given.w_r).sum((-2, -1)) if given.trace is None else given.trace
    flags = {name: getattr(given, name) for name in ("averaged", "lambda_squared", "squared")}
    rest = given.lambda_diag, given.num_queries, given.num_keys
    return mean_j(torch.stack(energies), trace, *rest, **flags)


def mean_j(  # noqa: PLR0913 - J has as many parts
    energies: Tensor,  # [2, B, H, S]: sums of e^2 and of r^2 over the tokens
    trace: Tensor,  # Tr(W_e^T W_r), [H] or [B, H]
    lambda_diag: Tensor,  # [H, S]
    num_queries: Tensor,  # [B]
    num_keys: Tensor,  # [B]
    *,
    averaged: bool,
    lambda_squared: bool = False,
    squared: bool = True,
    num_tokens: int | None = None,
) -> Tensor:
    r"""Compute the mean of $J^2$, or of J, over the sequences with a token on either side.

    $J = \frac12 \sum_i e_i^\top \Lambda e_i + \frac12 \sum_i r_i^\top \Lambda r_i
    - Tr(W_e^\top W_r)$ of eq. (11), the mean over the heads. The sums are means over the tokens
    where ``averaged``; ``lambda_squared`` puts the square of Lambda in its place. ``num_tokens``
    is the number of queries and of keys of every sequence, where nothing is masked.
    """
    if averaged and num_tokens is None:
        counts = torch.stack((num_queries, num_keys)).clamp(min=1)
        energies = energies / counts[:, :, None, None]
    diagonal = lambda_diag.square() if lambda_squared else lambda_diag
    half = 0.5 / num_tokens if averaged and num_tokens is not None else 0.5
    j = ((energies * diagonal).sum((0, 3)) * half - trace).mean(-1)
    values = j.square() if squared else j
    if num_tokens is not None:
        return values.mean()
    return mean_over_sequences(values, num_queries, num_keys)


def mean_over_sequences(values: Tensor, num_queries: Tensor, num_keys: Tensor) -> Tensor:
    """Average values [B] over the sequences with a token on either side; zero without any."""
    real = torch.minimum(num_queries, num_keys) > 0
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)


def unexplained_energy(
    grams: tuple[Tensor, Tensor],  # [B, H, P, P]: of the queries and of the keys
    weights: tuple[Tensor, Tensor],  # [B, H, P, S] or [H, P, S]
    lambda_diag: Tensor,  # [H, S]
    x_sampled: Tensor | None,  # F_X [B, H, M, P]; None where it is the identity
) -> Tensor:
    r"""Compute $|K - E \Lambda R^\top|_F^2 / |K|_F^2$ of each sequence and head, [B, H].

    It equals $Tr(G_q M G_k M^\top) / Tr(G_q A G_k A)$ with $M = A - W_{e|X} \Lambda W_{r|X}^\top$
    and $A = F_X^\top F_X$. A kernel without energy has nothing unexplained. What cancels in the
    entries of a kernel cancels squared here: where all of them are a thousandth of
    $|\phi_q| |A| |\phi_k|$, such as for one token with a nearly orthogonal query, six digits go.
    """
    w_e, w_r = weights
    explained = (w_e * lambda_diag[:, None, :]) @ w_r.mT
    if x_sampled is None:
        identity = torch.eye(explained.shape[-1], dtype=explained.dtype, device=explained.device)
        energy = (grams[0] * grams[1].mT).sum((-2, -1))
        left = _energy(grams, identity - explained)
    else:
        a = x_sampled.mT @ x_sampled
        size = a.detach().abs().amax((-2, -1), keepdim=True)  # cancels; avoids 0 / 0
        size = torch.where(size >= torch.finfo(a.dtype).tiny, size, 1.0)
        energy, left = (_energy(grams, middle / size) for middle in (a, a - explained))
    some = energy > 0
    return torch.where(some, left / torch.where(some, energy, 1.0), 0.0)


def _energy(grams: tuple[Tensor, Tensor], middle: Tensor) -> Tensor:
    r"""$|\Phi_q M \Phi_k^\top|_F^2 = Tr(G_q M G_k M^\top)$, [B, H]."""
    return ((grams[0] @ middle) * (middle @ grams[1])).sum((-2, -1))
