r"""Attention as support vector regression, after Nguyen et al. 2023.

"A Primal-Dual Framework for Transformers and Neural Networks", ICLR 2023. One head, float64, plain
functions of tensors. The keys are training inputs with implicit targets, a query is a test point,
and the values are, up to a factor, the dual variables of the regression

$f(x) = W\Phi(x) / h(x) + b$    (1)

The numbers (1) to (4) are those of docs/svr.md, which separates the paper's results from ours.

Legend: N queries, T keys, D coordinates, V outputs, P features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.theory.kernels import Exponential, Polynomial


class Head(NamedTuple):
    """The queries, keys and values of one head."""

    queries: Tensor  # [N, D]
    keys: Tensor  # [T, D]
    values: Tensor  # [T, V]


@dataclass(frozen=True)
class SVR:
    r"""The soft-margin regression (2) without bias, through its kernel matrix.

    $\min_W \frac12 |W|_F^2 + C \sum_{jd} [|y_j(d) - f(k_j)(d)| - \epsilon]_+$; the outputs d are
    separate problems that share the kernel.

    Attributes:
        kernel_matrix: $\tilde K_{ij} = \Phi(k_i)^\top\Phi(k_j) / (h(k_i) h(k_j))$, [T, T].
        targets: y, [T, V].
        epsilon: Half the width of the tube in which an error costs nothing.
        box: The price C of an error.
    """

    kernel_matrix: Tensor
    targets: Tensor
    epsilon: float
    box: float

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon must be at least 0 and finite, got {self.epsilon!r}")
        if not 0 < self.box < math.inf:
            raise ValueError(f"box must be positive and finite, got {self.box!r}")

    def primal_value(self, dual: Tensor) -> Tensor:
        r"""Evaluate (2) at the weights $W = \sum_j a_j \Phi(k_j)^\top / h(k_j)$ of dual a."""
        fitted = self.kernel_matrix @ dual
        excess = ((self.targets - fitted).abs() - self.epsilon).clamp(min=0)
        return (dual * fitted).sum() / 2 + self.box * excess.sum()

    def dual_value(self, dual: Tensor) -> Tensor:
        r"""Evaluate (3), $-\frac12 a^\top\tilde K a + y^\top a - \epsilon|a|_1$, summed."""
        quadratic = (dual * (self.kernel_matrix @ dual)).sum() / 2
        return (self.targets * dual).sum() - quadratic - self.epsilon * dual.abs().sum()

    def solve(self, *, tolerance: float = 1e-14, max_sweeps: int = 20_000) -> Tensor:
        r"""Find the a in $[-C, C]$ that maximises (3), [T, V], by coordinate descent.

        The best $a_j$ with the others fixed is the distance of $y_j$ from what they fit, less
        $\epsilon$, over $\tilde K_{jj}$, kept in the box.

        Raises:
            RuntimeError: If after ``max_sweeps`` a sweep still changes some fitted value by more
                than the tolerance times the largest target.
        """
        columns = self.kernel_matrix.unbind(1)
        diagonal = self.kernel_matrix.diagonal().tolist()
        dual = torch.zeros_like(self.targets)
        residual = self.targets.clone()  # y - K a
        enough = tolerance * float(self.targets.abs().max())
        for _ in range(max_sweeps):
            largest = 0.0
            for j, column in enumerate(columns):
                free = residual[j] + diagonal[j] * dual[j]
                shrunk = free.sign() * (free.abs() - self.epsilon).clamp(min=0)
                best = (shrunk / diagonal[j]).clamp(-self.box, self.box)
                step = best - dual[j]
                dual[j] = best
                residual -= torch.outer(column, step)
                largest = max(largest, diagonal[j] * float(step.abs().max()))
            if largest <= enough:
                return dual
        raise RuntimeError(f"the regression was not solved in {max_sweeps} sweeps")


def taylor_features(X: Tensor, degree: int) -> Tensor:
    r"""Compute features of $\exp(\langle x, z\rangle/\sqrt D)$ up to a total degree: [N, P].

    $\Phi_n(x) = \prod_i (x_i / D^{1/4})^{n_i} / \sqrt{n_1! \dots n_D!}$ over all n with
    $\sum_i n_i \le$ degree; P is the binomial coefficient (D + degree over degree).
    """
    if not isinstance(degree, int) or degree < 0:
        raise ValueError(f"degree must be an integer of at least 0, got {degree!r}")
    D = X.shape[1]
    powers = [
        Polynomial(total, gamma=D**-0.5, coef0=0.0).features(X) / math.factorial(total) ** 0.5
        for total in range(1, degree + 1)
    ]
    return torch.cat([torch.ones_like(X[:, :1]), *powers], dim=1)


def elu_features(X: Tensor) -> Tensor:
    """Compute elu(x) + 1, the features of linear attention."""
    return torch.nn.functional.elu(X) + 1


def feature_kernel(features: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the kernel of a feature map."""
    return lambda X, Z: features(X) @ features(Z).T


def primal_layer(
    phi: Tensor, weights: Tensor, normaliser: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Evaluate eq. (1) at the features [N, P] of any points: a layer with weights [V, P], [N, V].

    Without a normaliser [N] it is a fully connected layer of the features.
    """
    out = phi @ weights.T
    out = out if normaliser is None else out / normaliser[:, None]
    return out if bias is None else out + bias


def primal_weights(phi_k: Tensor, values: Tensor) -> Tensor:
    r"""Sum $W = \sum_j v_j \Phi(k_j)^\top$, the weights (1) that belong to the values: [V, P]."""
    return values.T @ phi_k


def primal_value(
    weights: Tensor, phi: Tensor, targets: Tensor, *, epsilon: float, box: float
) -> Tensor:
    r"""Evaluate (2) at any weights [V, P], for features $\Phi(k_j)/h(k_j)$ [T, P]."""
    excess = ((targets - primal_layer(phi, weights)).abs() - epsilon).clamp(min=0)
    return weights.square().sum() / 2 + box * excess.sum()


def support_vector_expansion(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    kernel: Callable[[Tensor, Tensor], Tensor],
    *,
    support: Tensor | None = None,
    normalise: bool = True,
) -> Tensor:
    r"""Compute $f(x) = \sum_j \kappa(x, k_j) v_j / h(x)$, eq. (4) with b = 0: [N, V].

    Args:
        queries: Test points x, [N, D].
        keys: Training points, [T, D].
        values: $v_j = a_j / h(k_j)$ for the dual variables a, [T, V].
        kernel: $\kappa$, a function of two sets of points.
        support: The training set of each query, bool [N, T]; None for all keys. A query without
            training points gets 0.
        normalise: $h(x) = \sum_j \kappa(x, k_j)$ over the training set, else 1.
    """
    similarity = kernel(queries, keys)
    if support is not None:
        similarity = torch.where(support, similarity, 0)
    if normalise:
        total = similarity.sum(1, keepdim=True)
        similarity = similarity / torch.where(total == 0, 1, total)
    return similarity @ values


def softmax_attention(head: Head, support: Tensor | None = None) -> Tensor:
    """Attend with the exponential kernel; a support makes it sparse, local or causal."""
    return support_vector_expansion(*head, Exponential(), support=support)


def linear_attention(head: Head, features: Callable[[Tensor], Tensor] = elu_features) -> Tensor:
    """Attend with a kernel of finitely many features."""
    return support_vector_expansion(*head, feature_kernel(features))


def fast_weights(head: Head) -> Tensor:
    """Attend with the points as features and h = 1: linear attention without normaliser."""
    return support_vector_expansion(*head, feature_kernel(lambda X: X), normalise=False)


def batch_norm(head: Head, *, beta: float = 1.0, rescale: bool = True, eps: float = 1e-5) -> Head:
    r"""Normalise queries and keys by mean and biased variance of the keys: Attention-BN.

    Any attention of the result is the BN form of that attention.
    """
    mean, variance = head.keys.mean(0), head.keys.var(0, correction=0)
    deviation = (variance + eps).sqrt() if rescale else torch.ones_like(mean)
    queries, keys = ((points - beta * mean) / deviation for points in head[:2])
    return Head(queries, keys, head.values)


def average_pool(head: Head, scale: int) -> Head:
    """Average each ``scale`` neighbouring keys, and their values: Attention-SH.

    The last mean is over fewer where they do not divide the number of keys.
    """
    pooled = (
        torch.stack([part.mean(0) for part in points.split(scale)])  # type: ignore[no-untyped-call]
        for points in head[1:]
    )
    return Head(head.queries, *pooled)


def multi_head(outputs: Sequence[Tensor], out_maps: Sequence[Tensor]) -> Tensor:
    r"""Compute $f(x) = \sum_s W_O^s f^s(x)$: separate regressions, mixed by maps [D, V] each."""
    mixed = [out @ out_map.T for out, out_map in zip(outputs, out_maps, strict=True)]
    return torch.stack(mixed).sum(0)


def dual_variables(keys: Tensor, values: Tensor) -> Tensor:
    r"""Compute $a_j = h(k_j) v_j$ of a softmax head, [T, V]."""
    return Exponential()(keys, keys).sum(1, keepdim=True) * values


def implied_regression(
    keys: Tensor, values: Tensor, *, epsilon: float = 0.0, box: float | None = None
) -> SVR:
    """Return the regression whose solution is the softmax head with these keys and values.

    Any box above :func:`effective_box` has the same solution; None takes twice that.
    """
    kernel_matrix = Exponential()(keys, keys)
    normaliser = kernel_matrix.sum(1)
    box = 2 * float(effective_box(keys, values)) if box is None else box
    targets = implied_targets(keys, values, epsilon=epsilon)
    return SVR(kernel_matrix / torch.outer(normaliser, normaliser), targets, epsilon, box)


def implied_targets(keys: Tensor, values: Tensor, *, epsilon: float = 0.0) -> Tensor:
    r"""Compute targets $y_j = f(k_j) + \epsilon\,\mathrm{sign}(v_j)$ of a softmax head, [T, V]."""
    return softmax_attention(Head(keys, keys, values)) + epsilon * values.sign()


def effective_box(keys: Tensor, values: Tensor) -> Tensor:
    """Return the largest dual variable of a softmax head: its C is not below it."""
    return dual_variables(keys, values).abs().max()


def support_fraction(keys: Tensor, values: Tensor, *, threshold: float = 0.0) -> Tensor:
    """Return the share of the tokens of a softmax head that are support vectors.

    Those with a dual variable above ``threshold`` times the largest. The others add nothing, or
    little, to the weights W; they still count in the normaliser.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be at least 0 and less than 1, got {threshold!r}")
    largest = dual_variables(keys, values).abs().amax(1)
    return (largest > threshold * largest.max()).to(keys.dtype).mean()


def flatness(keys: Tensor, values: Tensor) -> Tensor:
    r"""Sum $|W|_F^2 = \sum_{ij} \langle v_i, v_j\rangle \exp(\langle k_i, k_j\rangle/\sqrt D)$."""
    return (values * (Exponential()(keys, keys) @ values)).sum()
