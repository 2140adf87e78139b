"""Statistics of a training pass of a Primal layer, from which the objectives are computed.

Letters: B batch, H heads, P feature dim, S directions, M landmarks.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.objective import MeanJInputs, mean_j
from primal_attention.ops.op import fused
from primal_attention.ops.primal import Sides, gram, primal_scores
from primal_attention.precision import accumulate

Pair = tuple[Tensor, Tensor]  # of the queries and of the keys


class Grams(NamedTuple):
    """Phi^T Phi over the real tokens, of either side."""

    q: Tensor  # [B, H, P, P]
    k: Tensor


class KernelSums(NamedTuple):
    """Sums over the real tokens, and the weights given the data."""

    given_weights: Pair | None  # W_{e|X}, W_{r|X}: [B, H, P, S], or [H, P, S] for all sequences
    sides: tuple[Sides, ...] = ()  # both in one or one by one, for Gram matrices not given
    given_energies: Tensor | None = None
    given_grams: Pair | None = None
    trace: Tensor | None = None  # Tr(W_e^T W_r) = sum_i <h_e(x_i), e_i> where that is a sum, [B, H]
    shard: Any = None  # a ContextShard, over which the Gram matrices are added up

    @classmethod
    def of(cls, here: Sides, there: Sides, scores: Tensor, weights: Tensor) -> KernelSums:
        """Sum over the queries of here and the keys of there."""
        sides: tuple[Sides, ...] = (here._replace(h=None, steps=None),)
        energies = scores.square().sum(-2)  # [2, H, B, S]
        if there is not here:
            keys = there.side(1)
            sides = here.side(0)._replace(h=None), keys._replace(h=None)
            r = primal_scores(keys.z, weights[1:], keys.maps, keys.mask)
            energies = torch.cat((energies[:1], r.square().sum(-2)))
        weights = weights.transpose(1, 2) if weights.ndim == 5 else weights
        return cls((weights[0], weights[1]), sides, energies.transpose(1, 2))

    @classmethod
    def of_scores(cls, scores: Tensor, h: Tensor) -> KernelSums:
        """Sum scores and dual variables, for a kernel whose features are infinite."""
        trace = (h[0] * scores[0]).sum((-2, -1)).T
        energies = scores.square().sum(-2).transpose(1, 2)
        return cls(None, given_energies=energies, trace=trace)

    @property
    def weights(self) -> Pair:
        """W_{e|X} and W_{r|X}.

        Raises:
            ValueError: The kernel has a decay.
        """
        if self.given_weights is None:
            raise ValueError(
                "explained_energy and other measures of the weights are made of Gram matrices, "
                "which do not determine a kernel with a decay: its features are as many as there "
                "are tokens; use the objective 'released', 'released_batch' or 'zero'"
            )
        return self.given_weights

    @property
    def grams(self) -> Grams:
        """Gram matrices, computed on access where the pass did not."""
        _ = self.weights
        if self.given_grams is not None:
            return Grams(*self.given_grams)
        grams = torch.cat([gram(each.z, each.maps, each.mask) for each in self.sides])
        if self.shard is not None:
            (grams,) = self.shard.sum(grams)
        return Grams(*grams.transpose(1, 2))

    @property
    def energies(self) -> Tensor:
        """Sums of the squares of the scores, diag(W^T G W), [2, B, H, S]."""
        if self.given_energies is not None:
            return self.given_energies
        pairs = zip(self.grams, self.weights, strict=True)
        return torch.stack([(w * (g @ w)).sum(-2) for g, w in pairs])


class KSVDStatistics(NamedTuple):
    """All that a KSVD objective needs of one forward pass of one layer.

    No field is a parameter: a sharded layer frees its parameters right after the forward pass, so
    what depends on them is computed inside it.
    """

    sums: KernelSums
    landmarks: Landmarks | None  # F_X = X'; None where F_X is the identity
    trace: Tensor | None  # Tr(W_e^T W_r) of the parameters, [H]; None for that of dual weights
    lambda_diag: Tensor  # [H, S]
    num_queries: Tensor  # [B]: real tokens among the queries
    num_keys: Tensor  # [B]: real tokens among the keys
    averaged: bool  # J averages over tokens (dual weights) instead of summing
    with_gradients: bool  # taken with gradients enabled
    half: bool  # tokens of half precision are behind the sums
    num_tokens: int | None  # of all sequences and both sides, where nothing is masked
    differentiated: bool = False  # by a backward pass that freed the graph; only values are left

    def without_graph(self) -> KSVDStatistics:
        """Return the values alone, once the graph of the pass is used up."""
        detached: KSVDStatistics = tree_map_only(Tensor, Tensor.detach, self)
        return detached._replace(differentiated=True)

    def mean_j(self, *, averaged: bool, lambda_squared: bool, squared: bool) -> Tensor:
        """J of eq. (11), squared or not, the mean over the sequences of this pass."""
        options: dict[str, Any] = {
            "averaged": averaged,
            "lambda_squared": lambda_squared,
            "squared": squared,
        }
        rest = self.lambda_diag, self.num_queries, self.num_keys
        if self.sums.given_energies is None:
            given = *self.sums.grams, *self.sums.weights, self.trace
            found = fused("mean_j", MeanJInputs(*given, *rest, half=self.half, **options))
            if found is not None:
                return found[0]
        trace = self.trace
        if self.sums.trace is not None:
            trace = self.sums.trace
            trace = trace / self.num_queries.clamp(min=1)[:, None] if averaged else trace
        elif trace is None:
            w_e_given_x, w_r_given_x = self.sums.weights
            trace = (w_e_given_x * w_r_given_x).sum((-2, -1))
        return mean_j(self.sums.energies, trace, *rest, **options, num_tokens=self.num_tokens)

    @property
    def x_sampled(self) -> Tensor | None:
        """F_X [B, H, M, P]; None where it is the identity."""
        if self.landmarks is None:
            return None
        H = len(self.lambda_diag)
        return accumulate(rearrange(self.landmarks.rows(), "b m (h p) -> b h m p", h=H))


class Passes:
    """The training passes of one layer that one thread keeps."""

    def __init__(self) -> None:
        self.runs: list[KSVDStatistics] = []
        self.blocks = 0  # how many are open that keep all passes, not the latest alone


class _OfThread(threading.local):
    """The passes of the calling thread; a copied or pickled layer starts without them."""

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
        # not the parameters, whose memory a sharded layer frees
        ctx.kinds = [(each.shape, each.dtype, each.device) for each in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor, ...]:
        gradients = [d_outputs[0]]
        for shape, dtype, device in ctx.kinds:
            gradients.append(d_outputs[0].new_zeros(shape, dtype=dtype, device=device))
        return tuple(gradients)

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
    def passes(self) -> Passes:
        """Return the passes of the calling thread."""
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
        """Add Lambda and other unused parameters to the graph of a training pass's outputs.

        A compiled pass needs nothing: the statistics are outputs of its graph too.
        """
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return out
        parameters = []  # in a loop: a comprehension is one more call
        for each in (self.raw_lambda, *unused):
            if each is not None and each.requires_grad:
                parameters.append(each)
        if not parameters:
            return out
        with_parameters: Tensor = _WithZeroGradients.apply(out, *parameters)  # type: ignore[no-untyped-call]
        return with_parameters

    def record(self, statistics: KSVDStatistics) -> None:
        """Keep the statistics of the current forward pass."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        passes = self._of_thread.passes
        passes.runs = [*passes.runs, statistics] if passes.blocks else [statistics]
