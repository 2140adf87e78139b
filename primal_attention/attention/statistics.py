"""What a Primal layer leaves behind for the objectives, and when.

Letters: B batch, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.weights import ProjectionWeights
from primal_attention.ops.ksvd import trace
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.primal import gram
from primal_attention.precision import accumulate


class Grams(NamedTuple):
    """Phi^T Phi over the real tokens, of either side."""

    q: Tensor  # [B, H, P, P]
    k: Tensor


class Scored(NamedTuple):
    """What a pass that has made the scores leaves, from which Gram matrices can be had later."""

    energies: Tensor  # [B, 2, H, S]: the sums of e^2 and of r^2 over the real tokens
    qk: Tensor  # [B, N, 2, H, C]
    mask: Tensor | None  # [B, N], True at real tokens
    maps: tuple[str, str]

    def grams(self) -> Grams:
        """Both Gram matrices, by one more pass over queries and keys."""
        pairs = zip(self.qk.unbind(2), self.maps, strict=True)
        return Grams(*(gram(z, token_mask=self.mask, feature_map=name) for z, name in pairs))


class KSVDStatistics(NamedTuple):
    """All that a KSVD objective needs of one forward pass of one layer.

    Nothing of it is a parameter: a sharded layer gives its parameters back right after the forward
    pass, so that whatever is made of them is made inside it.
    """

    sums: Grams | Scored  # over the real tokens
    w_e_given_x: Tensor  # [B, H, P, S] or [H, P, S]
    w_r_given_x: Tensor
    landmarks: Landmarks | None  # F_X = X'; None where F_X is the identity
    trace: Tensor | None  # [H]: Tr(W_e^T W_r) of the parameters; None for that of the weights
    lambda_diag: Tensor  # [H, S]
    num_queries: Tensor  # [B]: real tokens among the queries
    num_keys: Tensor  # [B]: real tokens among the keys
    averaged: bool  # J averages over tokens (dual weights) instead of summing
    with_gradients: bool  # taken with gradients enabled
    half: bool = False  # tokens of half precision are behind the Gram matrices

    @property
    def grams(self) -> Grams:
        """Of this pass; made anew each time where they are not at hand."""
        return self.sums if isinstance(self.sums, Grams) else self.sums.grams()

    @property
    def x_sampled(self) -> Tensor | None:
        """F_X [B, H, M, P]; None where it is the identity."""
        return ProjectionWeights(self.w_e_given_x, self.w_r_given_x, self.landmarks).x_sampled


def ksvd_statistics(
    weights: ProjectionWeights,
    parameters: tuple[Tensor, Tensor] | None,  # w_e, w_r; None for dual weights
    lambda_diag: Tensor,
    sums: Grams | Scored,
    counts: tuple[Tensor, Tensor],
    *,
    half: bool = False,
) -> KSVDStatistics:
    """Gather the statistics of one forward pass.

    The trace term is that of the parameters. Static weights are the parameters or copies of them,
    so that theirs need not be kept apart. Dual weights have none: theirs is the trace of the
    weights given the data, and J averages over tokens, so that J = 0 at the SVD with
    Lambda = n / sigma.
    """
    dtype = sums[0].dtype
    w_e, w_r = parameters or (None, None)
    return KSVDStatistics(
        sums,
        weights.e.to(dtype, copy=weights.e is w_e),
        weights.r.to(dtype, copy=weights.r is w_r),
        weights.landmarks,
        None if parameters is None or weights.landmarks is None else trace(*parameters),
        lambda_diag,
        *counts,
        averaged=parameters is None,
        with_gradients=torch.is_grad_enabled(),
        half=half,
    )


class KSVDLayer(nn.Module):
    """A layer with singular directions: it owns Lambda and keeps the statistics of training passes.

    Lambda appears in the objectives alone, never in the outputs. The latest pass is kept; all of
    them while ``keep_all_runs`` is set, which is for ``record_ksvd`` to do. A pass that activation
    checkpointing repeats during the backward pass is no new one and is not kept.
    """

    def __init__(self, num_heads: int, num_directions: int) -> None:
        super().__init__()
        self.num_heads, self.num_directions = num_heads, num_directions
        self.raw_lambda = nn.Parameter(torch.empty(num_heads, num_directions))
        self.ksvd_runs: list[KSVDStatistics] = []
        self.keep_all_runs = False

    @property
    def lambda_diag(self) -> Tensor:
        """The diagonal of Lambda, positive, [H, S]."""
        return F.softplus(accumulate(self.raw_lambda))

    @lambda_diag.setter
    def lambda_diag(self, value: Tensor) -> None:
        if value.shape != self.raw_lambda.shape:
            raise ValueError(
                f"lambda_diag must have shape {list(self.raw_lambda.shape)}, "
                f"got {list(value.shape)}"
            )
        if not value.is_meta and not bool((value >= 0).all()):
            raise ValueError(f"lambda_diag must not be negative, got {value.min().item():.3g}")
        with torch.no_grad():
            value = accumulate(value).clamp(min=1e-12)
            self.raw_lambda.copy_(value + torch.log(-torch.expm1(-value)))

    def reset_lambda(self) -> None:
        """Draw Lambda uniformly in (0, 1), as released."""
        self.lambda_diag = torch.rand_like(self.raw_lambda)

    def record(self, statistics: KSVDStatistics) -> None:
        """Keep the statistics of the current forward pass."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        self.ksvd_runs = [*self.ksvd_runs, statistics] if self.keep_all_runs else [statistics]

    def __getstate__(self) -> dict[str, object]:
        # Statistics belong to a running graph: a copied or pickled layer starts without them.
        return {**self.__dict__, "ksvd_runs": [], "keep_all_runs": False}
