r"""The matrices of all heads of one sequence, dense or as factors, and what is read from them.

Letters: H heads, N queries, T keys, C head dim, P features, R columns, L = min(N, T) or less.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 256  # of a block
_MOST_ROWS = 1024  # read where all would cost more than the factors
_ROW_SUM = 1e-4  # how far the sum of an attention row may be from 1
_NEGATIVE = -1e-9
_OVERSAMPLING = 5

Attend = Callable[[Tensor], Tensor]
"""From values [H, T, C] to outputs [H, N, C] of one sequence."""


@dataclass(frozen=True)
class HeadMatrices:
    r"""An attention or kernel matrix K [N, T] for each of H heads, in float64.

    Attributes:
        left: K [H, N, T], or the factor L [H, N, P] of $K = L R^\top$.
        right: R [H, T, P]; None where ``left`` is K. No N x T matrix of factors is allocated.
        crossing: Whether the keys are of another sequence than the queries.
    """

    left: Tensor
    right: Tensor | None = None
    crossing: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, N and T."""
        H, N, T = self.left.shape
        return H, N, T if self.right is None else self.right.shape[1]

    def singular_values(self) -> Tensor:
        """Return all that can differ from zero, decreasing, [H, L]; of factors in O((N+T) P^2)."""
        values: Tensor = torch.linalg.svdvals(self._core())
        return values

    def norms(self) -> Tensor:
        r"""$|K|_F$, [H]."""
        return self._core().square().sum((-2, -1)).sqrt()

    def skew_norms(self) -> Tensor:
        r"""$|K - K^\top|_F$, [H]; of factors $K - K^\top = [L, R] [R, -L]^\top$."""
        if self.right is None:
            return HeadMatrices(self.left - self.left.mT).norms()
        return self.minus(self.right, self.left).norms()

    def minus(self, left: Tensor, right: Tensor) -> "HeadMatrices":
        r"""$K - L' R'^\top$ of factors K by the factors [H, N, Q] and [H, T, Q]."""
        assert self.right is not None
        rights = torch.cat([self.right, -right], dim=-1)
        return HeadMatrices(torch.cat([self.left, left], dim=-1), rights)

    def inner_products(self) -> Tensor:
        r"""$\langle K_g, K_h \rangle_F$ of all pairs of heads, [H, H]."""
        if self.right is None:
            flat = self.left.flatten(1)
            return flat @ flat.T
        lefts, rights = (torch.einsum("gnp,hnq->ghpq", z, z) for z in (self.left, self.right))
        products: Tensor = (lefts * rights).sum((-2, -1))
        return products

    def row_blocks(self) -> Iterator[Tensor]:
        """Yield all rows, a few at a time; of factors at most 1,024, evenly spaced."""
        stride = 1 if self.right is None else -(-self.shape[1] // _MOST_ROWS)
        for left in torch.split(self.left[:, ::stride], _ROWS, dim=1):
            yield left if self.right is None else left @ self.right.mT

    def dense(self) -> Tensor:
        """Return the dense matrices, [H, N, T]."""
        return self.left if self.right is None else self.left @ self.right.mT

    def _core(self) -> Tensor:
        """A matrix with the singular values of K, small where there are factors."""
        return self.left if self.right is None else triangle(self.left) @ triangle(self.right).mT


def triangle(columns: Tensor) -> Tensor:
    """Return R of a QR decomposition, which has the Gram matrix of the columns."""
    factor: Tensor = torch.linalg.qr(columns, mode="r").R
    return factor


def explained_energy(singular_values: Tensor) -> Tensor:
    r"""Cumulative explained variance $\sum_{i \le s} \sigma_i^2 / \sum_i \sigma_i^2$, [..., L].

    A matrix of zeros leaves nothing to explain: 1 from the first direction on.
    """
    energies = singular_values.square().cumsum(-1)
    total = energies[..., -1:]
    return torch.where(total > 0, energies / torch.where(total > 0, total, 1.0), 1.0)


def directions_for(explained: Tensor, energy: float) -> Tensor:
    """Count the directions needed to explain that much, [...]."""
    return (explained < energy * (1 - 1e-12)).sum(-1) + 1


def effective_rank(singular_values: Tensor) -> Tensor:
    r"""$\exp(-\sum_i p_i \log p_i)$, $p_i = \sigma_i / \sum_j \sigma_j$ (Roy and Vetterli 2007)."""
    total = singular_values.sum(-1, keepdim=True)
    p = singular_values / torch.where(total > 0, total, 1.0)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.exp()


def row_entropy(heads: HeadMatrices) -> Tensor:
    """Mean entropy of the rows in nats, [H]; NaN where the rows are no distributions."""
    entropies = []
    for rows in heads.row_blocks():
        proper = ((rows.sum(-1) - 1).abs() <= _ROW_SUM) & (rows >= _NEGATIVE).all(-1)
        entropy = torch.special.entr(rows.clamp(min=0)).sum(-1)
        entropies.append(torch.where(proper, entropy, torch.nan))
    return torch.cat(entropies, dim=1).mean(1)


def asymmetry(heads: HeadMatrices) -> Tensor:
    r"""$|K - K^\top|_F / |K|_F$, [H]: 0 symmetric, sqrt(2) orthogonal to the transpose, 2 skew.

    NaN in cross-attention, where rows and columns are of different tokens.
    """
    norms = heads.norms()
    if heads.crossing:
        return torch.full_like(norms, torch.nan)
    return torch.where(norms > 0, heads.skew_norms() / torch.where(norms > 0, norms, 1.0), 0.0)


def head_redundancy(heads: HeadMatrices) -> Tensor:
    """Mean cosine between the matrices of two different heads, a scalar; NaN for one head."""
    products = heads.inner_products()
    norms = products.diagonal().clamp(min=0).sqrt()
    norms = torch.where(norms > 0, norms, 1.0)
    cosines = products / norms / norms[:, None]
    g, h = torch.triu_indices(len(products), len(products), offset=1)
    return cosines[g, h].mean() if len(g) else products.new_tensor(torch.nan)


def attention_matrix(
    attend: Attend, like: Tensor, num_queries: int, rank_bound: int | None, *, crossing: bool
) -> HeadMatrices:
    r"""Find the matrices of a mechanism from what it does to values, $o = A v$.

    Columns of the identity in the place of v give A itself. Where the rank of A is far below the
    number of keys, a few random columns give its range and the gradient by v, $A^\top u$, the rest.

    Args:
        attend: The mechanism as a function of the values.
        like: Values [H, T, C] as it takes them, in float64.
        num_queries: N.
        rank_bound: An upper bound of the rank; None where there is none.
        crossing: Whether queries and keys are of different sequences.
    """
    H, T, _ = like.shape
    columns = T if rank_bound is None else rank_bound + _OVERSAMPLING
    if 2 * columns >= min(T, num_queries):
        eye = torch.eye(T, dtype=like.dtype, device=like.device)
        return HeadMatrices(_times(attend, eye.expand(H, T, T), like), crossing=crossing)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(H, T, columns, generator=generator, dtype=like.dtype).to(like.device)
    basis = torch.linalg.qr(_times(attend, start, like)).Q  # [H, N, R]
    return HeadMatrices(basis, _transposed_times(attend, basis, like), crossing)


@torch.no_grad()
def _times(attend: Attend, columns: Tensor, like: Tensor) -> Tensor:
    """A V of V [H, T, R], C columns at a time."""
    products = []
    for some in torch.split(columns, like.shape[-1], dim=-1):
        values = torch.zeros_like(like)
        values[..., : some.shape[-1]] = some
        products.append(attend(values)[..., : some.shape[-1]])
    return torch.cat(products, dim=-1)


@torch.enable_grad()
def _transposed_times(attend: Attend, columns: Tensor, like: Tensor) -> Tensor:
    r"""$A^\top U$ of U [H, N, R]: the gradient of $\langle U, A v \rangle$ by v."""
    products = []
    for some in torch.split(columns, like.shape[-1], dim=-1):
        values = torch.zeros_like(like).requires_grad_()
        product = (attend(values)[..., : some.shape[-1]] * some).sum()
        (gradient,) = torch.autograd.grad(product, values)
        products.append(gradient[..., : some.shape[-1]])
    return torch.cat(products, dim=-1)
