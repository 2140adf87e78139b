r"""Compare the values of softmax heads with what kernel theory puts in their place.

Two readings of attention name vectors that should stand in the place of the values.

- *KSVD*, eq. (8) of Chen et al. 2023: $e(x_i) = \sum_j K_{ij} h_{r_j}$ has the form
  $o_i = \sum_j A_{ij} v_j$; the values would be the leading right singular vectors of the attention
  matrix A.
- *Kernel PCA* of the keys. With $g(x) = \sum_l \exp(x^\top k_l / \sqrt C)$ and the features
  $\phi(k_j) / g(k_j)$ of the exponential kernel, component d is
  $u_d = \sum_j a_{jd} (\phi(k_j) / g(k_j) - mean)$, where a_d is an eigenvector of the centred
  Gram matrix of these features. The projection of $\phi(q) / g(q)$ on it is
  $\sum_j A(q)_j v_{jd}$ with $v_{jd} = (a_{jd} - \bar a_d) / g(k_j)$.

Both fix the vectors up to an invertible map of the channels, which the output projection may
undo, so what is compared are spans: how much of the energy of the values $V [T, C]$ lies in the
span of the s leading theoretical vectors, $|P V|_F^2 / |V|_F^2$. Values that have nothing to do
with them, drawn from a normal distribution, have s / T in the mean. Beside it stand the mean over
the channels of the largest |cosine| with a single one of these vectors, for the values and for
normal values of the same shape, and the share of the values' energy that all tokens have in common.
The rows of A sum to 1, so that its leading right vector is often near the constant one: values that
hardly differ from token to token agree with it for that reason alone.

Letters: H heads, T keys, C head dim, S vectors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.analysis.capture import capture, find_layers
from primal_attention.analysis.running_stats import RunningStats
from primal_attention.attention.baselines.softmax import SoftmaxAttention

LayerTheory = tuple[str, str]
"""The name of a layer, and ksvd or kernel_pca."""


class Agreement(NamedTuple):
    """Values against the vectors of one theory, with what chance alone gives; [H] each."""

    share: Tensor  # of the values' energy in the span
    share_by_chance: Tensor  # s / T
    constant: Tensor  # share of the values' energy that all tokens have in common
    cosine: Tensor  # mean over channels of the largest with one vector
    cosine_by_chance: Tensor


def value_alignment(
    model: nn.Module, data: Any, num_directions: int | None = None
) -> dict[LayerTheory, dict[str, float]]:
    """Compare the values of softmax heads with both theories: means over heads and sequences.

    Kernel PCA needs all queries to see all keys: causal layers and cross-attention have the first
    theory alone.

    Args:
        model: A model with softmax attention.
        data: As for :func:`primal_attention.analysis.spectrum`.
        num_directions: The number s of theoretical vectors; if None the head dimension, but at
            most half the keys, so that chance leaves something to see.
    """
    layers = [one for one in find_layers(model).found if type(one.mechanism) is SoftmaxAttention]
    stats: dict[LayerTheory, RunningStats] = {}
    for layer, captured in capture(model, data, layers):
        for sequence in captured.sequences():
            T, _, C = sequence.v.shape
            wanted = min(C, max(T // 2, 1)) if num_directions is None else num_directions
            for theory, vectors in _theories(captured, sequence).items():
                found = agreement(vectors[..., :wanted], sequence.v.transpose(0, 1))
                kept = stats.setdefault((layer.name, theory), RunningStats())
                kept.add(torch.stack(found, dim=1))
    return {
        key: dict(zip(Agreement._fields, each.mean.tolist(), strict=True))
        for key, each in stats.items()
    }


def right_singular_vectors(matrix: Tensor) -> Tensor:
    """Right singular vectors of attention matrices [H, N, T], leading first, [H, T, L]."""
    right: Tensor = torch.linalg.svd(matrix, full_matrices=False).Vh.mT
    return right


def kernel_pca_values(k: Tensor) -> Tensor:
    r"""Compute $(a_{jd} - \bar a_d) / g(k_j)$ of keys [H, T, C], leading first: [H, T, T-1]."""
    scores = k @ k.mT / k.shape[-1] ** 0.5  # [H, T, T]
    log_g = scores.logsumexp(-1, keepdim=True)
    logarithms = scores - log_g - log_g.mT
    gram = (logarithms - logarithms.amax((-2, -1), keepdim=True)).exp()  # a factor changes no span
    centred = gram - gram.mean(-1, keepdim=True) - gram.mean(-2, keepdim=True)
    centred = centred + gram.mean((-2, -1), keepdim=True)
    vectors: Tensor = torch.linalg.eigh(centred).eigenvectors.flip(-1)[..., :-1]
    inverse_g: Tensor = (log_g.amin((-2, -1), keepdim=True) - log_g).exp()
    return (vectors - vectors.mean(-2, keepdim=True)) * inverse_g


def agreement(vectors: Tensor, values: Tensor) -> Agreement:
    """Compare values [H, T, C] with theoretical vectors [H, T, S]."""
    T, S = vectors.shape[-2:]
    generator = torch.Generator().manual_seed(T)
    drawn = torch.randn(values.shape[-2:], generator=generator, dtype=values.dtype).to(values)
    basis = torch.linalg.qr(vectors).Q
    return Agreement(
        _share(basis, values),
        torch.full_like(values[..., 0, 0], S / T),
        _share(torch.full_like(values[..., :1], T**-0.5), values),
        _largest_cosine(vectors, values),
        _largest_cosine(vectors, drawn),
    )


def _theories(captured: Any, sequence: Any) -> dict[str, Tensor]:
    found = {"ksvd": right_singular_vectors(captured.matrix(sequence).dense())}
    if not captured.crossing and not captured.layer.causal and len(sequence.k) > 1:
        found["kernel_pca"] = kernel_pca_values(sequence.k.transpose(0, 1))
    return found


def _share(basis: Tensor, values: Tensor) -> Tensor:
    """The share of the energy of the values in the span of orthonormal vectors."""
    energy = values.square().sum((-2, -1))
    inside = (basis.mT @ values).square().sum((-2, -1))
    return torch.where(energy > 0, inside / energy, 0.0)


def _largest_cosine(vectors: Tensor, values: Tensor) -> Tensor:
    unit, columns = (nn.functional.normalize(z, dim=-2) for z in (vectors, values))
    return (unit.mT @ columns).abs().amax(-2).mean(-1)
