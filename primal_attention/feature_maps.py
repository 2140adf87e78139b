"""The feature maps g of Remark 4.1: phi_q(x) = g_q(q(x)), phi_k(x) = g_k(k(x)).

Two kinds. A *fixed map* has no parameters and keeps the dimension (P = C); the ops know it by name
and recompute it in the backward pass instead of keeping phi. A :class:`FeatureMap` is a module and
may be anything else, such as the random features of the exponential kernel.

Letters: C head dim, P feature dim.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from primal_attention.precision import accumulate, exact

FixedMap = Callable[[Tensor], Tensor]


def cosine(z: Tensor) -> Tensor:
    """Normalise to the unit vector z / |z|; 0 where z is 0 or |z|^2 is no normal number.

    All derivatives are 0 there. z is divided by its length as by a constant, and the result, whose
    length is near 1, by its own length: no derivative overflows.
    """
    length = torch.linalg.vector_norm(z.detach(), dim=-1, keepdim=True)
    known = (length >= math.sqrt(torch.finfo(z.dtype).tiny)) & (length <= torch.finfo(z.dtype).max)
    unit = z * torch.where(known, length.reciprocal(), 0.0)
    return unit * torch.where(known, (unit * unit).sum(-1, keepdim=True), 1.0).rsqrt()


def elu(z: Tensor) -> Tensor:
    """Compute elu + 1, positive everywhere: z + 1, and exp(z) on the negative side."""
    return torch.where(z > 0, z + 1.0, z.clamp(max=0.0).exp())


def unit_elu(z: Tensor) -> Tensor:
    """Normalise elu + 1.

    elu + 1 is exp(z) on the negative side, so a shift of a vector that is all negative is a factor,
    which the norm cancels: it is removed first, and nothing underflows.
    """
    return cosine(elu(z - z.detach().amax(-1, keepdim=True).clamp(max=0.0)))


def relu(z: Tensor) -> Tensor:
    """Compute max(z, 0)."""
    return z.clamp(min=0.0)


def identity(z: Tensor) -> Tensor:
    """Return queries or keys unchanged: the linear kernel."""
    return z


FIXED_MAPS: dict[str, FixedMap] = {
    "cosine": cosine,
    "elu": elu,
    "unit_elu": unit_elu,
    "relu": relu,
    "identity": identity,
}


class FeatureMap(nn.Module, ABC):
    """A map [..., C] -> [..., P] with a result of at least float32.

    If ``normalised``, features are divided by the square root of D-hat, see :func:`normaliser`.
    """

    normalised: ClassVar[bool] = False
    head_dim: int
    feature_dim: int

    @abstractmethod
    def forward(self, z: Tensor) -> Tensor:
        """Compute the features of queries or keys z."""


class ExponentialFeatureMap(FeatureMap):
    r"""Positive random features of the softmax kernel, Remark 4.1 (and Choromanski et al. 2021).

    $g(z) = P^{-1/2} (\exp(w_i^\top z - |z|^2 / 2) + \epsilon)_{i=1..P}$ with $w_i \sim N(0, I)$, so
    that $\langle g(q), g(k) \rangle$ estimates $\exp(q^\top k / \sqrt{C})$ without bias
    (up to epsilon): z is divided by $C^{1/4}$ first.

    Differences from the remark: the factors $P^{-1/2}$ and $C^{-1/4}$, which it leaves out though
    the softmax of eq. (2) has the second; the w_i are orthogonal in blocks of C, each of them still
    normal; and epsilon keeps D-hat away from zero where every exponential underflows.
    """

    normalised = True
    projection: Tensor

    def __init__(self, head_dim: int, num_features: int | None = None, *, eps: float = 1e-6):
        super().__init__()
        self.head_dim = _positive("head_dim", head_dim)
        self.feature_dim = _positive(
            "num_features", head_dim if num_features is None else num_features
        )
        self.eps = eps
        self.register_buffer("projection", torch.empty(self.feature_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions, also for a module that was built on the meta device."""
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new random directions w_i."""
        blocks = math.ceil(self.feature_dim / self.head_dim)
        square = torch.randn(blocks, self.head_dim, self.head_dim)
        basis, triangle = torch.linalg.qr(square)
        # With the signs of the triangle's diagonal the basis is uniform; without, it has a bias.
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
        directions = basis.reshape(-1, self.head_dim)[: self.feature_dim]
        lengths = torch.randn(self.feature_dim, self.head_dim).norm(dim=-1, keepdim=True)
        self.projection.copy_(directions * lengths)

    def forward(self, z: Tensor) -> Tensor:
        """Compute the features [..., P] of z [..., C]."""
        return _positive_random_features(z, self.projection, self.eps)

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"head_dim={self.head_dim}, num_features={self.feature_dim}, eps={self.eps}"


@exact
def _positive_random_features(z: Tensor, projection: Tensor, eps: float) -> Tensor:
    z = accumulate(z) * z.shape[-1] ** -0.25
    exponent = z @ projection.to(z.dtype).mT - z.square().sum(-1, keepdim=True) / 2
    return (exponent.exp() + eps) * (1.0 / math.sqrt(projection.shape[0]))


def normaliser(phi_q: Tensor, key_sum: Tensor) -> Tensor:
    r"""Compute D-hat of Remark 4.1 per token: $\hat D_i = \phi_q(x_i)^\top \sum_j \phi_k(x_j)$.

    Both scores of token i are divided by its square root; 1 where D-hat is 0, because no key has a
    feature in common with the query.
    """
    normaliser = (phi_q * key_sum).sum(-1, keepdim=True)
    return torch.where(normaliser > 0, normaliser, 1.0)


FeatureMapSpec = str | FeatureMap | Sequence[str | FeatureMap]


def feature_map_pair(spec: FeatureMapSpec, head_dim: int) -> list[str | FeatureMap]:
    """Build the maps of queries and keys: one entry where they share it, two where they differ.

    ``spec`` is a name (cosine, exponential, elu, unit_elu, relu, identity), a :class:`FeatureMap`,
    or a pair (for queries, for keys) of these.
    """
    specs = [spec] if isinstance(spec, str | FeatureMap) else spec
    if not isinstance(specs, list | tuple) or len(specs) not in (1, 2):
        raise ValueError(f"feature_map must be one map or a pair (queries, keys), got {spec!r}")
    maps = [_build(one, head_dim) for one in specs]
    dims = [head_dim if isinstance(one, str) else one.feature_dim for one in maps]
    if len(set(dims)) > 1:
        raise ValueError(
            f"feature_map: queries and keys need features of one size, got {dims[0]} and {dims[1]}"
        )
    normalised = [isinstance(one, FeatureMap) and one.normalised for one in maps]
    if len(set(normalised)) > 1:
        raise ValueError(
            f"feature_map: a normalised map goes with a normalised one, got the pair {spec!r}"
        )
    return maps


def _build(spec: str | FeatureMap, head_dim: int) -> str | FeatureMap:
    if isinstance(spec, FeatureMap):
        if spec.head_dim != head_dim:
            raise ValueError(
                f"feature_map was built for head_dim {spec.head_dim}, the layer has {head_dim}"
            )
        return spec
    if spec == "exponential":
        return ExponentialFeatureMap(head_dim)
    if spec not in FIXED_MAPS:
        names = ", ".join([*FIXED_MAPS, "exponential"])
        raise ValueError(f"feature_map must be one of {names}, or a FeatureMap, got {spec!r}")
    return spec


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
