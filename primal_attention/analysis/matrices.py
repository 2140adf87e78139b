r"""The matrices of all heads of one sequence, whole or as products of two narrow factors.

Letters: H heads, N queries, T keys, P features, L = min(N, T) or less.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 256  # of a block
_MOST_ROWS = 1024  # that are looked at where all would cost more than the factors


class HeadMatrices(ABC):
    """An attention or kernel matrix K [N, T] for each of H heads, in float64.

    Attributes:
        crossing: Whether the keys are of another sequence than the queries.
    """

    crossing: bool

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """H, N and T."""

    @abstractmethod
    def singular_values(self) -> Tensor:
        """All that can differ from zero, decreasing, [H, L]."""

    @abstractmethod
    def inner_products(self) -> Tensor:
        r"""$\langle K_g, K_h \rangle_F$ of all pairs of heads, [H, H]."""

    @abstractmethod
    def rows(self, some: slice) -> Tensor:
        """Some rows of every matrix, [H, n, T]."""

    @abstractmethod
    def skew_norms(self) -> Tensor:
        r"""$|K - K^\top|_F$, [H]."""

    def row_blocks(self) -> Iterator[Tensor]:
        """All rows, a few at a time; of factors at most 1,024, evenly spaced."""
        stride = self._stride()
        for start in range(0, self.shape[1], _ROWS * stride):
            yield self.rows(slice(start, start + _ROWS * stride, stride))

    def _stride(self) -> int:
        return 1

    def dense(self) -> Tensor:
        """The matrices themselves, [H, N, T]."""
        return self.rows(slice(None))


@dataclass(frozen=True)
class DenseHeads(HeadMatrices):
    """Matrices that are held as they are."""

    matrix: Tensor  # [H, N, T]
    crossing: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, N and T."""
        H, N, T = self.matrix.shape
        return H, N, T

    def singular_values(self) -> Tensor:
        """From the SVD."""
        return singular_values(self.matrix)

    def inner_products(self) -> Tensor:
        """Products of the flattened matrices."""
        flat = self.matrix.flatten(1)
        return flat @ flat.T

    def rows(self, some: slice) -> Tensor:
        """A slice."""
        return self.matrix[:, some]

    def skew_norms(self) -> Tensor:
        """The norm of the difference."""
        return frobenius(self.matrix - self.matrix.mT)


@dataclass(frozen=True)
class LowRankHeads(HeadMatrices):
    r"""Matrices $K = L R^\top$ known by their factors: no number of N x T is ever held."""

    left: Tensor  # [H, N, P]
    right: Tensor  # [H, T, P]
    crossing: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, N and T."""
        H, N, _ = self.left.shape
        return H, N, self.right.shape[1]

    def singular_values(self) -> Tensor:
        r"""Those of $R_L R_R^\top$ with the triangular factors of L and R: O((N + T) P^2)."""
        return singular_values(_core(self.left, self.right))

    def inner_products(self) -> Tensor:
        r"""$Tr((L_g^\top L_h)(R_g^\top R_h)^\top)$."""
        lefts, rights = (torch.einsum("gnp,hnq->ghpq", z, z) for z in (self.left, self.right))
        products: Tensor = (lefts * rights).sum((-2, -1))
        return products

    def rows(self, some: slice) -> Tensor:
        """Rows of the left factor times the right one."""
        return self.left[:, some] @ self.right.mT

    def _stride(self) -> int:
        return -(-self.shape[1] // _MOST_ROWS)

    def skew_norms(self) -> Tensor:
        r"""From $K - K^\top = [L, R] [R, -L]^\top$."""
        left = torch.cat([self.left, self.right], dim=-1)
        right = torch.cat([self.right, -self.left], dim=-1)
        return frobenius(_core(left, right))


def singular_values(matrix: Tensor) -> Tensor:
    """Of matrices [..., N, T]."""
    values: Tensor = torch.linalg.svdvals(matrix)
    return values


def frobenius(matrix: Tensor) -> Tensor:
    """Norms of matrices [..., N, T]."""
    return matrix.square().sum((-2, -1)).sqrt()


def triangle(columns: Tensor) -> Tensor:
    """The factor R of a QR decomposition: its Gram matrix is that of the columns."""
    factor: Tensor = torch.linalg.qr(columns, mode="r").R
    return factor


def _core(left: Tensor, right: Tensor) -> Tensor:
    r"""A small matrix with the singular values of $L R^\top$."""
    return triangle(left) @ triangle(right).mT
