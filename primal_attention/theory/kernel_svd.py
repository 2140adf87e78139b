r"""`KernelSVD`: the leading singular vectors of a kernel matrix between two large sets of points.

Only the exact solver forms the N x T kernel matrix K; the others read it one block of rows at a
time. They share one subspace iteration on $K^\top K$, which reads K once a step, and differ in
where it starts.

Legend: N points X (queries), T points Z (keys), S directions, L >= S columns iterated.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import normalize

from primal_attention.theory.kernels import KERNELS, Kernel
from primal_attention.theory.ksvd import fix_signs

Points = ArrayLike | Tensor
Array = NDArray[Any] | Tensor
KernelFunction = Callable[[Any, Any], Any]
SOLVERS = ("auto", "exact", "randomized", "nystrom")
EXACT_ENTRIES = 2**22  # largest kernel matrix that solver="auto" decomposes as a whole


class NotFittedError(ValueError, AttributeError):
    """`transform` was called before `fit`."""


class KernelSVD:
    r"""Singular value decomposition of an asymmetric kernel, eq. (7) of Chen et al. 2023.

    Finds $K H_r = H_e\Sigma$, $K^\top H_e = H_r\Sigma$ for $K_{ij} = \kappa(x_i, z_j)$.
    New points have the scores $e(x) = \sum_j\kappa(x, z_j)h_{r_j}$ and
    $r(z) = \sum_i\kappa(x_i, z)h_{e_i}$ of eq. (8), which need no feature map. Follows the
    conventions of scikit-learn without importing it.

    Args:
        n_directions: The number S of singular triplets.
        kernel: A name in `KERNELS`, one of their objects, or a function (X, Z) -> matrix of
            shape [len(X), len(Z)]; it is given NumPy arrays where `fit` was, else tensors.
        kernel_params: Keyword arguments of the named kernel or of the function.
        solver: "exact" decomposes the whole matrix; "randomized" iterates from random columns;
            "nystrom" from the asymmetric Nyström approximation of n_landmarks points of each
            set; "auto" is exact for at most 4 million entries and nystrom above.
        n_landmarks: The number of landmarks, at most all points of a set.
        n_iter: Steps of the subspace iteration. 0 leaves the Nyström approximation as it is.
        oversampling: Columns iterated beyond n_directions.
        block_size: Rows of the kernel matrix held at a time.
        random_state: Seed of the random columns or landmarks; None draws a new one.

    Attributes:
        singular_values_: [S], decreasing.
        left_vectors_: H_e, [N, S]; the largest entry of each column is positive.
        right_vectors_: H_r, [T, S].
        solver_: The solver that was used.
        n_features_in_: The number of coordinates of X.

    Examples:
        >>> X, Z = torch.randn(300, 5), torch.randn(200, 5)
        >>> e, r = KernelSVD(8, kernel="rbf", random_state=0).fit(X, Z=Z).transform(X, Z=Z)
        >>> e.shape, r.shape
        (torch.Size([300, 8]), torch.Size([200, 8]))
    """

    def __init__(  # noqa: PLR0913 - a public constructor, keyword-only
        self,
        n_directions: int = 32,
        *,
        kernel: str | Kernel | KernelFunction = "rbf",
        kernel_params: dict[str, Any] | None = None,
        solver: str = "auto",
        n_landmarks: int = 1000,
        n_iter: int = 6,
        oversampling: int = 32,
        block_size: int = 1024,
        random_state: int | None = None,
    ) -> None:
        self.n_directions = n_directions
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.solver = solver
        self.n_landmarks = n_landmarks
        self.n_iter = n_iter
        self.oversampling = oversampling
        self.block_size = block_size
        self.random_state = random_state

    def fit(self, X: Points, y: object = None, *, Z: Points | None = None) -> Self:
        """Decompose the kernel matrix between X [N, D] and Z, by default X; y is ignored."""
        x_points = _points("X", X)
        z_points = x_points if Z is None else _points("Z", Z)
        dtype = torch.promote_types(x_points.dtype, z_points.dtype)
        x_points, z_points = x_points.to(dtype), z_points.to(dtype)
        solver = self._check_parameters(len(x_points), len(z_points))
        takes_numpy = not isinstance(X, Tensor)
        triplets = self._solve(solver, self._matrix(x_points, z_points, takes_numpy))
        left, singular_values, right = triplets
        left, right = fix_signs(left[:, : self.n_directions], right[:, : self.n_directions])
        # assigned last, so that a failed fit leaves an earlier one whole
        self._x_points, self._z_points, self._takes_numpy = x_points, z_points, takes_numpy
        self.n_features_in_, self.solver_ = x_points.shape[1], solver
        self.left_vectors_, self.right_vectors_ = _as_given(X, left), _as_given(X, right)
        self.singular_values_ = _as_given(X, singular_values[: self.n_directions])
        return self

    def transform(self, X: Points, *, Z: Points | None = None) -> Array | tuple[Array, Array]:
        """Compute the scores e of X, [len(X), S]; with Z the pair of e and the scores r of Z."""
        self._check_is_fitted()
        x_points = _points("X", X, like=self._x_points)
        h_e, h_r = torch.as_tensor(self.left_vectors_), torch.as_tensor(self.right_vectors_)
        e_matrix = self._matrix(x_points, self._z_points, self._takes_numpy)
        e_scores = _as_given(X, e_matrix.matmul(h_r))
        if Z is None:
            return e_scores
        z_points = _points("Z", Z, like=self._z_points)
        r_matrix = self._matrix(self._x_points, z_points, self._takes_numpy)
        return e_scores, _as_given(Z, r_matrix.transposed_matmul(h_e))

    def fit_transform(
        self, X: Points, y: object = None, *, Z: Points | None = None
    ) -> Array | tuple[Array, Array]:
        """Fit, then transform the same points."""
        return self.fit(X, Z=Z).transform(X, Z=Z)

    def get_feature_names_out(self, input_features: object = None) -> Any:
        """Name the columns of the scores, kernelsvd0 and so on; `input_features` is ignored."""
        self._check_is_fitted()
        names = [f"kernelsvd{s}" for s in range(len(self.singular_values_))]
        return np.asarray(names, dtype=object)

    def __repr__(self) -> str:
        """Show the parameters that are not the defaults."""
        defaults = inspect.signature(type(self)).parameters
        shown = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if repr(value) != repr(defaults[name].default)
        ]
        return f"KernelSVD({', '.join(shown)})"

    def __sklearn_tags__(self) -> Any:
        """Describe the estimator to scikit-learn, which is imported only here."""
        from sklearn.utils import Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            non_deterministic=self.random_state is None,
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments; `deep` is ignored."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments by name."""
        if unknown := params.keys() - self.get_params().keys():
            raise ValueError(f"KernelSVD has no parameters named {sorted(unknown)}")
        vars(self).update(params)
        return self

    def _check_is_fitted(self) -> None:
        if not hasattr(self, "singular_values_"):
            raise NotFittedError("This KernelSVD is not fitted yet; call fit first")

    def _solve(self, solver: str, matrix: "_KernelMatrix") -> "_Triplets":
        """Find the leading triplets, perhaps more than wanted."""
        if solver == "exact":
            return _svd(_finite(torch.cat([entries for _, entries in matrix.blocks()])))
        generator = torch.Generator()
        seed = generator.seed() if self.random_state is None else int(self.random_state)
        generator.manual_seed(seed)
        columns = min(self.n_directions + self.oversampling, *matrix.shape)
        if solver == "randomized":
            start = torch.randn(matrix.shape[1], columns, generator=generator).to(matrix.Z)
            return _subspace_iteration(matrix, start, self.n_iter)
        nystrom = _nystrom(matrix, self.n_landmarks, columns, generator)
        return _subspace_iteration(matrix, nystrom.right, self.n_iter) if self.n_iter else nystrom

    def _matrix(self, X: Tensor, Z: Tensor, takes_numpy: bool) -> "_KernelMatrix":
        params = self.kernel_params or {}
        if isinstance(self.kernel, str):
            return _KernelMatrix(KERNELS[self.kernel](**params), X, Z, self.block_size)
        kernel: KernelFunction = self.kernel
        takes_numpy = takes_numpy and type(kernel) not in KERNELS.values()

        def function(X: Tensor, Z: Tensor) -> Tensor:
            points = (X.numpy(), Z.numpy()) if takes_numpy else (X, Z)
            entries = torch.as_tensor(kernel(*points, **params)).to(Z)
            if entries.shape != (len(X), len(Z)):
                expected, shape = (len(X), len(Z)), tuple(entries.shape)
                raise ValueError(f"kernel must return a matrix of shape {expected}, got {shape}")
            return entries

        return _KernelMatrix(function, X, Z, self.block_size)

    def _check_parameters(self, N: int, T: int) -> str:
        """Check all parameters for N and T points, and choose the solver."""
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {SOLVERS}, got {self.solver!r}")
        solver = self.solver
        if solver == "auto":
            solver = "exact" if N * T <= EXACT_ENTRIES else "nystrom"
        known = self.kernel in KERNELS if isinstance(self.kernel, str) else callable(self.kernel)
        if not known:
            names = tuple(KERNELS)
            raise ValueError(f"kernel must be one of {names} or callable, got {self.kernel!r}")
        least_points = min(N, T)
        _check_count(
            "n_directions", self.n_directions, 1, least_points, f" of {least_points} sample(s)"
        )
        least = self.n_directions if solver == "nystrom" else 1
        _check_count("n_landmarks", self.n_landmarks, least)
        _check_count("n_iter", self.n_iter, 0)
        _check_count("oversampling", self.oversampling, 0)
        _check_count("block_size", self.block_size, 1)
        if self.random_state is not None:
            _check_count("random_state", self.random_state, 0)
        return solver


class _Triplets(NamedTuple):
    left: Tensor  # [N, L]
    singular_values: Tensor  # [L]
    right: Tensor  # [T, L]


class _KernelMatrix(NamedTuple):
    """The N x T kernel matrix between two sets of points, known by blocks of rows."""

    kernel: Callable[[Tensor, Tensor], Tensor]
    X: Tensor  # [N, D]
    Z: Tensor  # [T, D]
    block_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.X), len(self.Z)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield every slice of rows with its entries, [block_size, T]."""
        for start in range(0, len(self.X), self.block_size):
            rows = slice(start, start + self.block_size)
            yield rows, self.kernel(self.X[rows], self.Z)

    def matmul(self, columns: Tensor) -> Tensor:
        """Compute K V, [T, L] -> [N, L]."""
        return _finite(torch.cat([entries @ columns for _, entries in self.blocks()]))

    def transposed_matmul(self, columns: Tensor) -> Tensor:
        """Compute K^T U, [N, L] -> [T, L]."""
        total = columns.new_zeros(len(self.Z), columns.shape[1])
        for rows, entries in self.blocks():
            total.addmm_(entries.T, columns[rows])
        return _finite(total)

    def gram_matmul(self, columns: Tensor) -> Tensor:
        """Compute K^T K V, [T, L] -> [T, L], reading K once."""
        total = torch.zeros_like(columns)
        for _, entries in self.blocks():
            total.addmm_(entries.T, entries @ columns)
        return _finite(total)


def _subspace_iteration(matrix: _KernelMatrix, start: Tensor, n_iter: int) -> _Triplets:
    """Find triplets of K from the columns of the start, [T, L], by n_iter steps of K^T K."""
    basis = torch.linalg.qr(start).Q  # [T, L]
    for _ in range(n_iter):
        basis = torch.linalg.qr(matrix.gram_matmul(basis)).Q
    image_basis, factor = torch.linalg.qr(matrix.matmul(basis))  # [N, L], [L, L]
    left, singular_values, right = _svd(factor)
    return _Triplets(image_basis @ left, singular_values, basis @ right)


def _nystrom(
    matrix: _KernelMatrix, n_landmarks: int, columns: int, generator: torch.Generator
) -> _Triplets:
    """Approximate by the asymmetric Nyström method: landmarks of both sets, extended by eq. (8).

    The singular values grow with the root of the number of points; the vectors have unit length and
    are only nearly orthogonal.
    """
    kernel, X, Z, _ = matrix
    x_marks = X[torch.randperm(len(X), generator=generator)[:n_landmarks]]
    z_marks = Z[torch.randperm(len(Z), generator=generator)[:n_landmarks]]
    left, singular_values, right = _svd(_finite(kernel(x_marks, z_marks)))
    growth = (len(X) * len(Z) / (len(x_marks) * len(z_marks))) ** 0.5
    left_extended = matrix._replace(Z=z_marks).matmul(right[:, :columns])  # [N, L]
    right_extended = matrix._replace(X=x_marks).transposed_matmul(left[:, :columns])  # [T, L]
    left_unit, right_unit = (normalize(part, dim=0) for part in (left_extended, right_extended))
    return _Triplets(left_unit, growth * singular_values[:columns], right_unit)


def _svd(matrix: Tensor) -> _Triplets:
    left, singular_values, right_t = torch.linalg.svd(matrix, full_matrices=False)
    return _Triplets(left, singular_values, right_t.T)


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ValueError("kernel must return finite values for these points, got inf or nan")
    return values


def _check_count(
    name: str, value: int, least: int, most: float = float("inf"), of: str = ""
) -> None:
    if not isinstance(value, int | np.integer) or not least <= value <= most:
        bounds = f"between {least} and {most}" if most < float("inf") else f"at least {least}"
        raise ValueError(f"{name} must be an integer, {bounds}, got {value!r}{of}")


def _as_given(points: Points, result: Tensor) -> Array:
    return result if isinstance(points, Tensor) else result.numpy()


def _points(name: str, points: Points, like: Tensor | None = None) -> Tensor:
    """Copy and check the points, [N, D], in float32 or float64, or cast them as `like`."""
    tensor = points.detach().clone() if isinstance(points, Tensor) else _copied(name, points)
    if tensor.is_complex():
        raise ValueError(
            f"{name} must be real, got {tensor.dtype}. Complex data not supported: pass real and "
            f"imaginary parts as coordinates of their own"
        )
    tensor = tensor if tensor.is_floating_point() else tensor.to(torch.float64)
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    if tensor.ndim != 2:
        raise ValueError(
            f"{name} must have shape [points, D], got {shape}. Reshape your data to a row a point"
        )
    for count, what in zip(shape, ("sample", "feature"), strict=True):
        if count == 0:
            raise ValueError(
                f"{name} must not be empty, got 0 {what}(s) (shape={shape}) while a minimum of 1 "
                f"is required."
            )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be finite, got inf or nan")
    if like is None:
        return tensor
    if tensor.shape[1] != like.shape[1]:
        seen, got = like.shape[1], tensor.shape[1]
        raise ValueError(
            f"{name} has {got} features, but KernelSVD is expecting {seen} features as input, "
            f"those seen by fit"
        )
    return tensor.to(like)


def _copied(name: str, points: ArrayLike) -> Tensor:
    """Copy a dense array of any numeric objects into a tensor."""
    if hasattr(points, "toarray"):
        raise TypeError(
            f"{name} must be dense, got a sparse {type(points).__name__}; pass {name}.toarray()"
        )
    array = np.array(points)
    if array.dtype.kind not in "biufc":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} must hold numbers, got {array.dtype}: {error}") from None
    return torch.tensor(array)
