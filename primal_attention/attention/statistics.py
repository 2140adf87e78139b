"""What a Primal layer leaves behind for the objectives, and when.

Letters: B batch, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

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
    differentiated: bool = False  # by a backward pass that freed the graph; only values are left

    @property
    def grams(self) -> Grams:
        """Of this pass; made anew each time where they are not at hand."""
        return self.sums if isinstance(self.sums, Grams) else self.sums.grams()

    def without_graph(self) -> KSVDStatistics:
        """The values alone, once the graph of the pass is used up."""
        return KSVDStatistics(*map(_detached, self))._replace(differentiated=True)

    @property
    def x_sampled(self) -> Tensor | None:
        """F_X [B, H, M, P]; None where it is the identity."""
        return ProjectionWeights(self.w_e_given_x, self.w_r_given_x, self.landmarks).x_sampled


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, tuple):
        return value
    items = map(_detached, value)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


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


class Passes:
    """The training passes of one layer that one thread keeps."""

    def __init__(self) -> None:
        self.runs: list[KSVDStatistics] = []
        self.blocks = 0  # how many blocks are open that keep all passes

    def keep(self, run: KSVDStatistics) -> None:
        """Keep a pass: the latest alone, or all that run inside a block."""
        self.runs = [*self.runs, run] if self.blocks else [run]

    def let_go(self, runs: list[KSVDStatistics]) -> None:
        """Let go of the graph of these passes, where they are still those that are kept."""
        if self.runs is runs:
            self.runs = [run.without_graph() for run in runs]

    def open_block(self) -> None:
        """Keep all passes from here on; those from before the outermost block are let go."""
        if not self.blocks:
            self.runs = []
        self.blocks += 1

    def close_block(self) -> None:
        """The end of a block, after which its passes stay kept until the layer next runs."""
        self.blocks -= 1


class _OfThread(threading.local):
    """The passes of the calling thread.

    They belong to a running graph: a copied or pickled layer starts without them.
    """

    def __init__(self) -> None:
        self.passes = Passes()

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:
        return _OfThread, ()


class _WithZeroGradients(torch.autograd.Function):
    """The first tensor as it is, in whose graph the others stand with their derivative, zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, *parameters: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor, ...]:
        d_out = d_outputs[0]
        zeros = (d_out.new_zeros(s, dtype=d, device=at) for s, d, at in ctx.parameters)
        return d_out, *zeros

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])


class KSVDLayer(nn.Module):
    """A layer with singular directions: it owns Lambda and keeps the statistics of training passes.

    Lambda acts on the objectives alone. The outputs of a training pass have it in their graph all
    the same, with the gradient zero: optimisers, gradient clipping and distributed data parallelism
    meet no parameter without a gradient. Each thread keeps its latest pass; all of them inside
    ``record_ksvd``. A pass that activation checkpointing repeats during the backward pass is no new
    one and is not kept.
    """

    def __init__(self, num_heads: int, num_directions: int) -> None:
        super().__init__()
        self.num_heads, self.num_directions = num_heads, num_directions
        self.raw_lambda = nn.Parameter(torch.empty(num_heads, num_directions))
        self._of_thread = _OfThread()

    @property
    def ksvd_runs(self) -> list[KSVDStatistics]:
        """The training passes that this thread has run and keeps."""
        return self.passes.runs

    @property
    def passes(self) -> Passes:
        """Those of this thread."""
        return self._of_thread.passes

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

    def with_zero_gradients(self, out: Tensor, *unused: Tensor | None) -> Tensor:
        """The outputs of a training pass, in whose graph Lambda and other unused parameters are.

        A compiled pass needs nothing: the statistics are outputs of its graph too.
        """
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return out
        parameters = [p for p in (self.raw_lambda, *unused) if p is not None and p.requires_grad]
        if not parameters:
            return out
        with_parameters: Tensor = _WithZeroGradients.apply(out, *parameters)  # type: ignore[no-untyped-call]
        return with_parameters

    def record(self, statistics: KSVDStatistics) -> None:
        """Keep the statistics of the current forward pass."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        self.passes.keep(statistics)
