"""What is read from singular values and from matrices. Letters as in `matrices`."""

import torch
from torch import Tensor

from primal_attention.analysis.matrices import HeadMatrices

_ROW_SUM = 1e-4  # how far the sum of an attention row may be from 1
_NEGATIVE = -1e-9


def explained_energy(singular_values: Tensor) -> Tensor:
    r"""Cumulative explained variance $\sum_{i \le s} \sigma_i^2 / \sum_i \sigma_i^2$, [..., L].

    A matrix of zeros leaves nothing to explain: 1 from the first direction on.
    """
    energies = singular_values.square().cumsum(-1)
    total = energies[..., -1:]
    return torch.where(total > 0, energies / torch.where(total > 0, total, 1.0), 1.0)


def directions_for(explained: Tensor, energy: float) -> Tensor:
    """The least number of directions that explain that much, [...]."""
    return (explained < energy * (1 - 1e-12)).sum(-1) + 1


def effective_rank(singular_values: Tensor) -> Tensor:
    r"""$\exp(-\sum_i p_i \log p_i)$, $p_i = \sigma_i / \sum_j \sigma_j$ (Roy and Vetterli 2007)."""
    total = singular_values.sum(-1, keepdim=True)
    p = singular_values / torch.where(total > 0, total, 1.0)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.exp()


def row_entropy(heads: HeadMatrices) -> Tensor:
    """Mean entropy of the rows in nats, [H]; NaN where the rows are no distributions."""
    blocks = [_row_entropies(block) for block in heads.row_blocks()]
    return torch.cat(blocks, dim=1).mean(1)


def asymmetry(heads: HeadMatrices) -> Tensor:
    r"""$|K - K^\top|_F / |K|_F$, [H]: 0 symmetric, sqrt(2) orthogonal to the transpose, 2 skew.

    NaN in cross-attention, where rows and columns are of different tokens.
    """
    norms = heads.inner_products().diagonal().clamp(min=0).sqrt()
    if heads.crossing:
        return torch.full_like(norms, torch.nan)
    return torch.where(norms > 0, heads.skew_norms() / torch.where(norms > 0, norms, 1.0), 0.0)


def head_redundancy(heads: HeadMatrices) -> Tensor:
    """Mean cosine between the matrices of two different heads, a scalar; NaN for one head."""
    products = heads.inner_products()
    norms = products.diagonal().clamp(min=0).sqrt()
    cosines = (
        products / torch.where(norms > 0, norms, 1.0) / torch.where(norms > 0, norms, 1.0)[:, None]
    )
    g, h = torch.triu_indices(len(products), len(products), offset=1)
    return cosines[g, h].mean() if len(g) else products.new_tensor(torch.nan)


def _row_entropies(rows: Tensor) -> Tensor:
    """Of rows [H, n, T], [H, n]."""
    proper = ((rows.sum(-1) - 1).abs() <= _ROW_SUM) & (rows >= _NEGATIVE).all(-1)
    return torch.where(proper, torch.special.entr(rows.clamp(min=0)).sum(-1), torch.nan)
