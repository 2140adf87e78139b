r"""Predictions that know how sure they are: KEP-SVGP of Chen, Tonin and Suykens (ICML 2024).

A pair of sparse Gaussian processes on the scores E and R of a Primal layer, whose inducing features
are the singular directions: $K_{fu} = E \Lambda$ and $K_{uu} = \Lambda^2$. With $u = \Lambda v$ the
singular values cancel, and what is left are Gaussian weights on the scores,

    f = E v,    q(v) = N(mu, L L^T),    prior N(0, I).

Letters: B batch, N tokens, H heads, S directions, T sides (e and r), O outputs, as many as S.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.attention.base.shards import Sharded
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.primal import PrimalAttention
from primal_attention.precision import accumulate


class GaussianScores(Sharded):
    """Scores [B, N, H, T S] times weights [S, O] of each head and side, which are Gaussian.

    In training, and within :func:`posterior_samples`, each sequence draws weights of its own, one
    function for all of its tokens (packed sequences share theirs). Otherwise weights are the mean.

    Args:
        num_heads: Number of heads H.
        num_directions: Number of singular directions S.
        num_sides: 2 for scores of both sides, 1 for one.
        initial_std: Standard deviation of the weights at the start; their mean is the identity.
    """

    drawing = False

    def __init__(
        self,
        num_heads: int,
        num_directions: int,
        num_sides: int = 2,
        *,
        initial_std: float = 0.1,
    ):
        check_sizes(num_heads=num_heads, num_directions=num_directions, num_sides=num_sides)
        if not 0 < initial_std < math.inf:
            raise ValueError(f"initial_std must be positive and finite, got {initial_std}")
        super().__init__()
        one = torch.eye(num_directions)
        self.mean = nn.Parameter(one.repeat(num_heads, num_sides, 1, 1))  # [H, T, O, S]
        log_std = math.log(initial_std) * one
        self.raw_factor = nn.Parameter(log_std.repeat(num_heads, num_sides, num_directions, 1, 1))

    def factor(self) -> Tensor:
        """Return the Cholesky factors L [H, T, O, S, S] of the covariances of the weights."""
        raw = self.raw_factor
        return raw.tril(-1) + raw.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def forward(self, rows: Tensor) -> Tensor:
        """Return values [B, N, H, T O] of the functions at scores [B, N, H, T S]."""
        scores = rows.reshape(*rows.shape[:-1], self.mean.shape[1], -1)
        if not (self.training or self.drawing):
            return torch.einsum("...nhts,htos->...nhto", scores, self.mean).flatten(-2)
        noise = torch.randn(
            *rows.shape[:-3], *self.mean.shape, dtype=self.mean.dtype, device=rows.device
        )
        weights = self.mean + torch.einsum("htosr,...htor->...htos", self.factor(), noise)
        return torch.einsum("...nhts,...htos->...nhto", scores, weights).flatten(-2)

    def kl_divergence(self) -> Tensor:
        """Sum the Kullback-Leibler divergences of the weights from their prior."""
        mean, factor = accumulate(self.mean), accumulate(self.factor())
        log_det = accumulate(self.raw_factor).diagonal(dim1=-2, dim2=-1).sum()
        return (mean.square().sum() + factor.square().sum() - mean.numel()) / 2 - log_det

    def needs_whole(self) -> str | None:
        """Say why sequences cannot be sharded."""
        return "the tokens of a sequence share one draw of GaussianScores"


def add_uncertainty(
    model: nn.Module, layers: int | Iterable[int] = -1, *, initial_std: float = 0.1
) -> nn.Module:
    """Put Gaussian processes on the scores of Primal layers, in place; returns the model.

    Args:
        model: Any module with Primal layers in it.
        layers: Which of them, by index; the last one by default.
        initial_std: See :class:`GaussianScores`.
    """
    found = [layer for layer in model.modules() if isinstance(layer, PrimalAttention)]
    chosen = [layers] if isinstance(layers, int) else list(layers)
    for index in chosen:
        if not -len(found) <= index < len(found):
            raise ValueError(
                f"layers={layers!r} has no place among the {len(found)} Primal layers of "
                f"{type(model).__name__}"
            )
        layer = found[index]
        projection = layer.score_proj
        if not isinstance(projection, nn.Linear):
            raise ValueError(
                f"Primal layer {index} has no plain score_proj, got {type(projection).__name__}; "
                "add uncertainty once, to a layer that is not folded, before adapters"
            )
        sides = projection.in_features // layer.num_directions
        scores = GaussianScores(
            layer.num_heads, layer.num_directions, sides, initial_std=initial_std
        )
        scores.to(projection.weight).train(layer.training)
        layer.score_proj = nn.Sequential(scores, projection)  # type: ignore[assignment]
    return model


def is_uncertain(model: nn.Module) -> bool:
    """Return whether a model has Gaussian scores."""
    return any(isinstance(each, GaussianScores) for each in model.modules())


def kl_divergence(model: nn.Module) -> Tensor:
    """Sum the KL divergences of all Gaussian scores; the loss takes it over the number of cases."""
    found = [each for each in model.modules() if isinstance(each, GaussianScores)]
    if not found:
        raise ValueError(
            f"kl_divergence: {type(model).__name__} has no Gaussian scores; call "
            "add_uncertainty(model) first"
        )
    return torch.stack([each.kl_divergence() for each in found]).sum()


@contextmanager
def posterior_samples(model: nn.Module) -> Iterator[None]:
    """Draw weights in evaluation too, anew in every forward pass, from torch's generator."""
    found = [each for each in model.modules() if isinstance(each, GaussianScores)]
    before = [each.drawing for each in found]
    for each in found:
        each.drawing = True
    try:
        yield
    finally:
        for each, was in zip(found, before, strict=True):
            each.drawing = was


def log_predictive(model: nn.Module, *args: Any, draws: int = 10, **inputs: Any) -> Tensor:
    """Return the logarithm of the mean of class probabilities over draws of the weights.

    Args:
        model: Returns logits [..., K].
        *args: Inputs of the model.
        draws: Number of forward passes.
        **inputs: Further inputs.
    """
    check_sizes(draws=draws)
    with posterior_samples(model):
        each = [model(*args, **inputs).log_softmax(-1) for _ in range(draws)]
    mean: Tensor = torch.stack(each).logsumexp(0) - math.log(draws)
    return mean
