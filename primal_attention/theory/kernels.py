r"""Kernels: functions $\kappa(x, z)$ of two points, as small immutable values.

A kernel is called with two sets of points and returns the matrix of all their values. Where
$\kappa(x, z) = \langle\phi(x), \phi(z)\rangle$ for a finite feature map, `features` computes it.

Legend: N points of the first set, T of the second, D their coordinates, P features.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor


class Kernel(ABC):
    """A kernel function."""

    @abstractmethod
    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """Evaluate all pairs, [N, D] and [T, D] -> [N, T]."""

    def features(self, X: Tensor) -> Tensor:
        """Compute the finite feature map, [N, D] -> [N, P]; ValueError where there is none."""
        raise ValueError(f"{self} has no finite feature map; call the kernel instead")


@dataclass(frozen=True)
class Cosine(Kernel):
    r"""$\kappa(x, z) = \langle x, z\rangle / (|x||z|)$, and 0 where a point is 0.

    The kernel of the experiments of Chen et al. 2023 (Remark 4.1).
    """

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """Evaluate all pairs, [N, D] and [T, D] -> [N, T]."""
        _check_points(X, Z)
        return self.features(X) @ self.features(Z).T

    def features(self, X: Tensor) -> Tensor:
        """Normalise the rows of X; rows of zeros stay zero, with zero gradient."""
        # The map does not see the length of a row, so dividing by the largest entry first only
        # keeps the squares from under- or overflowing.
        largest = X.detach().abs().amax(dim=1, keepdim=True)  # [N, 1]
        X = X / torch.where(largest > 0, largest, 1)
        length = torch.linalg.vector_norm(X, dim=1, keepdim=True)  # [N, 1]
        return X / torch.where(length > 0, length, torch.inf)


@dataclass(frozen=True)
class Exponential(Kernel):
    r"""$\kappa(x, z) = \exp(c\,\langle x, z\rangle)$: the attention score before its normaliser.

    Attributes:
        scale: The factor c; None stands for $1/\sqrt{D}$.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            _check_positive("scale", self.scale)

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """Evaluate all pairs, [N, D] and [T, D] -> [N, T]."""
        _check_points(X, Z)
        scale = X.shape[1] ** -0.5 if self.scale is None else self.scale
        return ((scale * X) @ Z.T).exp_()


@dataclass(frozen=True)
class RBF(Kernel):
    r"""$\kappa(x, z) = \exp(-\gamma\,|x - z|^2)$.

    Attributes:
        gamma: The factor of the squared distance; None stands for 1/D.
    """

    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None:
            _check_positive("gamma", self.gamma)

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """Evaluate all pairs, [N, D] and [T, D] -> [N, T]."""
        _check_points(X, Z)
        gamma = 1 / X.shape[1] if self.gamma is None else self.gamma
        # -gamma |x - z|^2 is one matrix product of the points with two more coordinates each.
        # Distances do not see a common shift, which keeps the product from cancelling.
        shift = Z.detach().mean(dim=0)
        X, Z = X - shift, Z - shift
        x_norm, z_norm = (-gamma * points.square().sum(1, keepdim=True) for points in (X, Z))
        x_long = torch.cat([2 * gamma * X, x_norm, torch.ones_like(x_norm)], dim=1)
        z_long = torch.cat([Z, torch.ones_like(z_norm), z_norm], dim=1)
        return (x_long @ z_long.T).clamp_(max=0).exp_()


@dataclass(frozen=True)
class Polynomial(Kernel):
    r"""$\kappa(x, z) = (\gamma\,\langle x, z\rangle + c)^{degree}$.

    Attributes:
        degree: The power, an integer of at least 1.
        gamma: The factor of the inner product; None stands for 1/D.
        coef0: The constant c, at least 0.
    """

    degree: int = 3
    gamma: float | None = None
    coef0: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"degree must be an integer of at least 1, got {self.degree!r}")
        if self.gamma is not None:
            _check_positive("gamma", self.gamma)
        if not 0 <= self.coef0 < math.inf:
            raise ValueError(f"coef0 must be at least 0 and finite, got {self.coef0!r}")

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """Evaluate all pairs, [N, D] and [T, D] -> [N, T]."""
        _check_points(X, Z)
        return (self._gamma(X) * (X @ Z.T) + self.coef0) ** self.degree

    def features(self, X: Tensor) -> Tensor:
        r"""Compute all monomials of the degree, times the root of their multinomial coefficients.

        The constant is one more coordinate $\sqrt{c}$, so P is the binomial coefficient
        (D + degree over degree), or (D + degree - 1 over degree) where c = 0.
        """
        coordinates = self._gamma(X) ** 0.5 * X  # [N, D]
        if self.coef0 > 0:
            constant = torch.full_like(X[:, :1], self.coef0**0.5)
            coordinates = torch.cat([coordinates, constant], dim=1)  # [N, D + 1]
        monomials = list(combinations_with_replacement(range(coordinates.shape[1]), self.degree))
        roots = [math.sqrt(_multinomial(monomial)) for monomial in monomials]
        phi = torch.tensor(roots, dtype=X.dtype, device=X.device).expand(len(X), -1)  # [N, P]
        for factor in torch.tensor(monomials, device=X.device).T:
            phi = phi * coordinates[:, factor]
        return phi

    def _gamma(self, X: Tensor) -> float:
        return 1 / X.shape[1] if self.gamma is None else self.gamma


KERNELS: dict[str, type[Kernel]] = {
    "cosine": Cosine,
    "exponential": Exponential,
    "rbf": RBF,
    "polynomial": Polynomial,
}


def scale_of(rule: str, X: Tensor, Z: Tensor, most: int = 1000) -> float:
    """Choose a gamma from the points: "median", or "scale" as support vector machines have it.

    Args:
        rule: "median" is one over the median squared distance, "scale" one over D times the
            variance of all coordinates.
        X: Points [N, D].
        Z: Points [T, D].
        most: Distances are taken between so many evenly spaced points of each set.
    """
    if rule == "scale":
        size = X.shape[1] * torch.cat([X, Z]).var(correction=0)
    elif rule == "median":
        x_some, z_some = (points[:: -(-len(points) // most)] for points in (X, Z))
        distances = torch.cdist(x_some, z_some).square().flatten()
        size = distances[distances > 0].median() if bool(distances.any()) else distances.sum()
    else:
        raise ValueError(f"gamma must be a number, 'median' or 'scale', got {rule!r}")
    return 1 / float(size) if size > 0 else 1.0


def _multinomial(monomial: tuple[int, ...]) -> int:
    """Count the orders of the factors of a monomial: degree! / (a_1! a_2! ...)."""
    repeats = math.prod(math.factorial(count) for count in Counter(monomial).values())
    return math.factorial(len(monomial)) // repeats


def _check_points(X: Tensor, Z: Tensor) -> None:
    for name, points in (("X", X), ("Z", Z)):
        if points.ndim != 2:
            raise ValueError(f"{name} must have shape [points, D], got {tuple(points.shape)}")
    if X.shape[1] != Z.shape[1]:
        raise ValueError(f"Z must have the {X.shape[1]} coordinates of X, got {Z.shape[1]}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
