r"""The attention matrix of a mechanism that is known only by what it does to values.

The outputs of attention are linear in its values, $o = A v$. Columns of the identity in the place
of v give A itself. Where A has a low rank, a few random columns give its range, and the gradient
by v, which is $A^\top u$, the rest: neither A nor anything of its size is formed.

Letters: H heads, N queries, T keys, C head dim, R columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from primal_attention.analysis.matrices import DenseHeads, HeadMatrices, LowRankHeads

Attend = Callable[[Tensor], Tensor]
"""From values [H, T, C] to outputs [H, N, C] of one sequence."""

_OVERSAMPLING = 5


def attention_matrix(
    attend: Attend, like: Tensor, num_queries: int, rank: int | None, *, crossing: bool
) -> HeadMatrices:
    """The matrices of all heads, by factors where their rank is far below the number of keys.

    Args:
        attend: What the mechanism does to values.
        like: Values [H, T, C] as it takes them, in float64.
        num_queries: N.
        rank: An upper bound of the rank; None where there is none.
        crossing: Whether queries and keys are of different sequences.
    """
    H, T, _ = like.shape
    columns = T if rank is None else rank + _OVERSAMPLING
    if 2 * columns >= min(T, num_queries):
        eye = torch.eye(T, dtype=like.dtype, device=like.device)
        return DenseHeads(_times(attend, eye.expand(H, T, T), like), crossing)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(H, T, columns, generator=generator, dtype=like.dtype).to(like.device)
    basis = torch.linalg.qr(_times(attend, start, like)).Q  # [H, N, R]
    return LowRankHeads(basis, _transposed_times(attend, basis, like), crossing)


def _times(attend: Attend, columns: Tensor, like: Tensor) -> Tensor:
    """A V of V [H, T, R], C columns at a time."""
    C = like.shape[-1]
    parts = []
    with torch.no_grad():
        for start in range(0, columns.shape[-1], C):
            some = columns[..., start : start + C]
            values = torch.zeros_like(like)
            values[..., : some.shape[-1]] = some
            parts.append(attend(values)[..., : some.shape[-1]])
    return torch.cat(parts, dim=-1)


def _transposed_times(attend: Attend, columns: Tensor, like: Tensor) -> Tensor:
    r"""$A^\top U$ of U [H, N, R]: the gradient of $\langle U, A v \rangle$ by v."""
    parts = []
    C = like.shape[-1]
    for start in range(0, columns.shape[-1], C):
        some = columns[..., start : start + C]
        with torch.enable_grad():
            values = torch.zeros_like(like).requires_grad_()
            product = (attend(values)[..., : some.shape[-1]] * some).sum()
            (gradient,) = torch.autograd.grad(product, values)
        parts.append(gradient[..., : some.shape[-1]])
    return torch.cat(parts, dim=-1)
