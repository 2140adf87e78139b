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

from primal_attention.theory.kernels import KERNELS, Kernel, scale_of
from primal_attention.theory.ksvd import fix_signs

Points = ArrayLike | Tensor
Array = NDArray[Any] | Tensor
KernelFunction = Callable[[Any, Any], Any]
SOLVERS = ("auto", "exact", "randomized", "nystrom")
EXACT_ENTRIES = 2**22  # largest kernel matrix that solver="auto" decomposes as a whole
DEFAULT_DIRECTIONS = 32


class NotFittedError(ValueError, AttributeError):
    """`transform` was called before `fit`."""


class KernelSVD:
    r"""Singular value decomposition of an asymmetric kernel, eq. (7) of Chen et al. 2023.

    Finds $K H_r = H_e\Sigma$, $K^\top H_e = H_r\Sigma$ for $K_{ij} = \kappa(x_i, z_j)$.
    New points have the scores $e(x) = \sum_j\kappa(x, z_j)h_{r_j}$ and
    $r(z) = \sum_i\kappa(x_i, z)h_{e_i}$ of eq. (8), which need no feature map. Follows the
    conventions of scikit-learn without importing it.

    With weights of the points the singular vectors are those of $W^{1/2}KV^{1/2}$, divided by the
    roots: $H_e^\top W H_e = I$, and a weight of 2 is a point given twice. Centred, K is the
    covariance of the two feature maps: the mean of each over its points is taken off.

    Args:
        n_directions: The number S of singular triplets; None stands for 32, or for as many as there
            are points where these are fewer.
        kernel: A name in `KERNELS`, one of their objects, or a function (X, Z) -> matrix of
            shape [len(X), len(Z)]; it is given NumPy arrays where `fit` was, else tensors.
            "precomputed": X is the kernel matrix itself, and in `transform` the rows of new points;
            there Z holds $\kappa(x_i, z)$ for the N points x_i, a row for each z.
        kernel_params: Keyword arguments of the named kernel or of the function. A `gamma` of
            "median" is one over the median squared distance of the points, "scale" one over their
            variance times D.
        center: Take the means of the feature maps off.
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
        explained_energy_ratio_: [S], the share of $|K|_F^2$ in each direction.
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
        n_directions: int | None = None,
        *,
        kernel: str | Kernel | KernelFunction = "rbf",
        kernel_params: dict[str, Any] | None = None,
        center: bool = False,
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
        self.center = center
        self.solver = solver
        self.n_landmarks = n_landmarks
        self.n_iter = n_iter
        self.oversampling = oversampling
        self.block_size = block_size
        self.random_state = random_state

    def fit(
        self,
        X: Points,
        y: object = None,
        *,
        Z: Points | None = None,
        sample_weight: ArrayLike | None = None,
        z_weight: ArrayLike | None = None,
    ) -> Self:
        """Decompose the kernel matrix between X [N, D] and Z, by default X; y is ignored.

        Weights are not negative, [N] and [T]; without Z those of X count on both sides.
        """
        x_points = _points("X", X)
        if self.kernel == "precomputed":
            if Z is not None:
                raise ValueError("kernel='precomputed' takes no Z: X is the whole kernel matrix")
            z_points = torch.arange(x_points.shape[1]).to(x_points)[:, None]
        else:
            z_points = x_points if Z is None else _points("Z", Z)
        dtype = torch.promote_types(x_points.dtype, z_points.dtype)
        x_points, z_points = x_points.to(dtype), z_points.to(dtype)
        of_x = _weights("sample_weight", sample_weight, x_points)
        if z_weight is None and Z is None and self.kernel != "precomputed":
            of_z = of_x
        else:
            of_z = _weights("z_weight", z_weight, z_points)
        solver, S = self._check_parameters(len(x_points), len(z_points))
        takes_numpy = not isinstance(X, Tensor)
        kernel = self._function(x_points, z_points, takes_numpy)
        plain = _KernelMatrix(kernel, x_points, z_points, self.block_size)
        matrix = _Weighted.of(plain, of_x, of_z, centred=self.center)
        left, values, right = (part[..., :S] for part in self._solve(solver, matrix, S))
        left, right = fix_signs(_unrooted(left, of_x), _unrooted(right, of_z))
        # assigned last, so that a failed fit leaves an earlier one whole
        self._kernel, self._x_points, self._z_points = kernel, x_points, z_points
        self.n_features_in_, self.solver_ = x_points.shape[1], solver
        self.left_vectors_, self.right_vectors_ = _as_given(X, left), _as_given(X, right)
        self.singular_values_ = _as_given(X, values)
        energy = values.square() / matrix.squared_norm()
        self.explained_energy_ratio_ = _as_given(X, energy)
        of_e, of_r = matrix.coefficients(left, of_x), matrix.coefficients(right, of_z)
        self._coefficients, self._means = (of_e, of_r), None
        if self.center:
            e, r = plain.matmul(of_r), plain.transposed_matmul(of_e)
            self._means = _mean(e, of_x), _mean(r, of_z)
        return self

    def transform(self, X: Points, *, Z: Points | None = None) -> Any:
        """Compute the scores e of X, [len(X), S]; with Z the pair of e and the scores r of Z.

        The scores of X are a data frame after ``set_output(transform="pandas")``.
        """
        self._check_is_fitted()
        x_points = _points("X", X, like=self._x_points)
        of_e, of_r = self._coefficients
        mean_e, mean_r = self._means or (0.0, 0.0)
        e = _KernelMatrix(self._kernel, x_points, self._z_points, self.block_size).matmul(of_r)
        e_scores = self._framed(X, _as_given(X, e - mean_e))
        if Z is None:
            return e_scores
        if self.kernel == "precomputed":
            r = _points("Z", Z, like=self._x_points.T) @ of_e
        else:
            z_points = _points("Z", Z, like=self._z_points)
            matrix = _KernelMatrix(self._kernel, self._x_points, z_points, self.block_size)
            r = matrix.transposed_matmul(of_e)
        return e_scores, _as_given(Z, r - mean_r)

    def fit_transform(self, X: Points, y: object = None, **options: Any) -> Any:
        """Fit, then transform the same points; the options are those of `fit`."""
        return self.fit(X, **options).transform(X, Z=options.get("Z"))

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose between arrays ("default") and a data frame ("pandas") of the scores."""
        if transform not in (None, "default", "pandas"):
            raise ValueError(f"transform must be 'default' or 'pandas', got {transform!r}")
        if transform is not None:
            self._output = transform
        return self

    def _framed(self, X: Points, scores: Array) -> Any:
        if getattr(self, "_output", "default") == "default":
            return scores
        import pandas

        index = getattr(X, "index", None)
        return pandas.DataFrame(np.asarray(scores), index, self.get_feature_names_out())

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
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(pairwise=self.kernel == "precomputed"),
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

    def _solve(self, solver: str, matrix: "_Weighted", S: int) -> "_Triplets":
        """Find the leading triplets, perhaps more than wanted."""
        if solver == "exact":
            return _svd(matrix.entries())
        generator = torch.Generator()
        seed = generator.seed() if self.random_state is None else int(self.random_state)
        generator.manual_seed(seed)
        columns = min(S + self.oversampling, *matrix.plain.shape)
        if solver == "randomized":
            start = torch.randn(len(matrix.plain.Z), columns, generator=generator)
            return _subspace_iteration(matrix, start.to(matrix.plain.Z), self.n_iter)
        nystrom = _nystrom(matrix, self.n_landmarks, columns, generator)
        return _subspace_iteration(matrix, nystrom.right, self.n_iter) if self.n_iter else nystrom

    def _function(self, X: Tensor, Z: Tensor, takes_numpy: bool) -> KernelFunction:
        """The kernel as a function of two tensors, with its parameters settled for these points."""
        if self.kernel == "precomputed":
            return lambda X, Z: X[:, Z[:, 0].long()]
        params = dict(self.kernel_params or {})
        if isinstance(params.get("gamma"), str):
            params["gamma"] = scale_of(params["gamma"], X, Z)
        if isinstance(self.kernel, str):
            return KERNELS[self.kernel](**params)
        kernel: KernelFunction = self.kernel
        takes_numpy = takes_numpy and type(kernel) not in KERNELS.values()

        def function(X: Tensor, Z: Tensor) -> Tensor:
            points = (X.numpy(), Z.numpy()) if takes_numpy else (X, Z)
            entries = torch.as_tensor(kernel(*points, **params)).to(Z)
            if entries.shape != (len(X), len(Z)):
                expected, shape = (len(X), len(Z)), tuple(entries.shape)
                raise ValueError(f"kernel must return a matrix of shape {expected}, got {shape}")
            return entries

        return function

    def _check_parameters(self, N: int, T: int) -> tuple[str, int]:
        """Check all parameters for N and T points; choose the solver and the directions."""
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {SOLVERS}, got {self.solver!r}")
        solver = self.solver
        if solver == "auto":
            solver = "exact" if N * T <= EXACT_ENTRIES else "nystrom"
        names = (*KERNELS, "precomputed")
        known = self.kernel in names if isinstance(self.kernel, str) else callable(self.kernel)
        if not known:
            raise ValueError(f"kernel must be one of {names} or callable, got {self.kernel!r}")
        least_points = min(N, T)
        S = self.n_directions
        if S is None:
            S = min(DEFAULT_DIRECTIONS, least_points)
        _check_count("n_directions", S, 1, least_points, f" of {least_points} sample(s)")
        _check_count("n_landmarks", self.n_landmarks, S if solver == "nystrom" else 1)
        _check_count("n_iter", self.n_iter, 0)
        _check_count("oversampling", self.oversampling, 0)
        _check_count("block_size", self.block_size, 1)
        if self.random_state is not None:
            _check_count("random_state", self.random_state, 0)
        return solver, S


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

    def gram_matmul(self, columns: Tensor, weights: Tensor | None) -> Tensor:
        """Compute K^T W K V, [T, L] -> [T, L], reading K once."""
        total = torch.zeros_like(columns)
        for rows, entries in self.blocks():
            product = entries @ columns
            total.addmm_(entries.T, product if weights is None else weights[rows, None] * product)
        return _finite(total)


class _Weighted(NamedTuple):
    r"""The matrix $W^{1/2}(I - 1w^\top)K(I - v1^\top)V^{1/2}$ whose triplets are wanted.

    W and V hold the weights of the points, w and v the same with a sum of one; without weights they
    are the identity. The factors in brackets stand for centring, and are left out without it.
    """

    plain: _KernelMatrix
    of_x: Tensor | None  # [N]
    of_z: Tensor | None  # [T]
    mean: Tensor | None  # [T], w^T K, where centred

    @classmethod
    def of(
        cls, plain: _KernelMatrix, of_x: Tensor | None, of_z: Tensor | None, *, centred: bool
    ) -> "_Weighted":
        """Weigh a kernel matrix, and centre it where asked."""
        if not centred:
            return cls(plain, of_x, of_z, None)
        share = torch.ones_like(plain.X[:, 0]) if of_x is None else of_x
        mean = plain.transposed_matmul((share / share.sum())[:, None])[:, 0]
        return cls(plain, of_x, of_z, mean)

    def at(self, rows: Tensor | None, columns: Tensor | None) -> "_Weighted":
        """The matrix of some of the points of either set."""
        plain, of_x, of_z, mean = self
        if rows is not None:
            plain = plain._replace(X=plain.X[rows])
            of_x = None if of_x is None else of_x[rows]
        if columns is not None:
            plain = plain._replace(Z=plain.Z[columns])
            of_z = None if of_z is None else of_z[columns]
        return self.of(plain, of_x, of_z, centred=mean is not None)

    def coefficients(self, vectors: Tensor, weights: Tensor | None) -> Tensor:
        """Coefficients of points in the scores of singular vectors, [N, S] or [T, S]."""
        return self._off_mean(vectors if weights is None else weights[:, None] * vectors, weights)

    def matmul(self, columns: Tensor) -> Tensor:
        """Multiply columns [T, L] to [N, L]."""
        product = self.plain.matmul(self._read(columns, self.of_z))
        return self._written(product, self.of_x)

    def transposed_matmul(self, columns: Tensor) -> Tensor:
        """Multiply columns [N, L] by the transpose, to [T, L]."""
        product = self.plain.transposed_matmul(self._read(columns, self.of_x))
        return self._written(product, self.of_z)

    def gram_matmul(self, columns: Tensor) -> Tensor:
        """Multiply columns [T, L] by the transpose times the matrix, reading K once."""
        columns = self._read(columns, self.of_z)
        product = self.plain.gram_matmul(columns, self.of_x)
        if self.mean is not None:
            total = len(self.plain.X) if self.of_x is None else self.of_x.sum()
            product -= total * self.mean[:, None] * (self.mean @ columns)
        return self._written(product, self.of_z)

    def entries(self) -> Tensor:
        """All N x T entries."""
        blocks = torch.cat([entries for _, entries in self.plain.blocks()])
        return _finite(self._written(self._written(blocks, self.of_x).T, self.of_z).T)

    def squared_norm(self) -> Tensor:
        """The energy $|K|_F^2$, a block of rows at a time."""
        total = self.plain.X.new_zeros(())
        for rows, entries in self.plain.blocks():
            entries = entries if self.mean is None else entries - self.mean
            energies = self._written(entries.T, self.of_z).square().sum(0)
            total += (energies if self.of_x is None else self.of_x[rows] * energies).sum()
        return total

    def _read(self, columns: Tensor, weights: Tensor | None) -> Tensor:
        """Multiply each row by the root of its weight, then centre as the kernel is read."""
        return self._off_mean(_rooted(columns, weights), weights)

    def _off_mean(self, vectors: Tensor, weights: Tensor | None) -> Tensor:
        if self.mean is None:
            return vectors
        share = 1 / len(vectors) if weights is None else (weights / weights.sum())[:, None]
        return vectors - share * vectors.sum(0)

    def _written(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Centre the rows, then multiply each by the root of its weight."""
        return _rooted(rows if self.mean is None else rows - _mean(rows, weights), weights)


def _mean(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.mean(0) if weights is None else weights @ rows / weights.sum()


def _rooted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else weights.sqrt()[:, None] * rows


def _unrooted(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Divide each row by the root of its weight; one without a weight becomes zero."""
    if weights is None:
        return rows
    root = weights.sqrt()[:, None]
    return torch.where(root > 0, rows / torch.where(root > 0, root, 1), 0)


def _subspace_iteration(matrix: _Weighted, start: Tensor, n_iter: int) -> _Triplets:
    """Find triplets of K from the columns of the start, [T, L], by n_iter steps of K^T K."""
    basis = torch.linalg.qr(start).Q  # [T, L]
    for _ in range(n_iter):
        basis = torch.linalg.qr(matrix.gram_matmul(basis)).Q
    image_basis, factor = torch.linalg.qr(matrix.matmul(basis))  # [N, L], [L, L]
    left, singular_values, right = _svd(factor)
    return _Triplets(image_basis @ left, singular_values, basis @ right)


def _nystrom(
    matrix: _Weighted, n_landmarks: int, columns: int, generator: torch.Generator
) -> _Triplets:
    """Approximate by the asymmetric Nyström method: landmarks of both sets, extended by eq. (8).

    The singular values grow with the root of the number of points; the vectors have unit length and
    are only nearly orthogonal.
    """
    N, T = matrix.plain.shape
    x_marks = torch.randperm(N, generator=generator)[:n_landmarks]
    z_marks = torch.randperm(T, generator=generator)[:n_landmarks]
    left, singular_values, right = _svd(matrix.at(x_marks, z_marks).entries())
    growth = (N * T / (len(x_marks) * len(z_marks))) ** 0.5
    left_extended = matrix.at(None, z_marks).matmul(right[:, :columns])  # [N, L]
    right_extended = matrix.at(x_marks, None).transposed_matmul(left[:, :columns])  # [T, L]
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


def _weights(name: str, weights: ArrayLike | None, points: Tensor) -> Tensor | None:
    """Check the weights of points, [N], finite and not negative."""
    if weights is None:
        return None
    tensor = torch.as_tensor(np.asarray(weights)).to(points)
    if tensor.shape != points.shape[:1]:
        raise ValueError(f"{name} must have shape ({len(points)},), got {tuple(tensor.shape)}")
    if not bool((tensor.isfinite() & (tensor >= 0)).all()) or not bool(tensor.any()):
        raise ValueError(f"{name} must be finite, not negative and not zero in every weight")
    return tensor


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
