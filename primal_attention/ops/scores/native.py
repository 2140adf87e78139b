"""A piece of scores of the cosine map in float32 by ``native.cpp``, where it could be compiled.

Letters: b sequences, n tokens, H heads, P feature dim, S directions.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from primal_attention.ops.native import library

_SOURCE = Path(__file__).with_name("native.cpp")


class _Sizes(ctypes.Structure):
    """The struct of the same name."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("b", "n", "G", "P", "S"),
            *("z_sequence", "z_token"),
            *("score_sequence", "score_token"),
            *("d_score_sequence", "d_score_token"),
            *("weight_sequence", "mask_sequence", "threads"),
        )
    ]


def wrote_scores(
    qk: Tensor,  # [b, n, 2, H, P]
    weights: Tensor,  # [b, 2, H, P, S]
    token_mask: Tensor | None,  # [b, n]
    scores: Tensor,  # [b, n, 2, H, S], written
    energies: Tensor,  # [b, 2, H, S], added to
) -> bool:
    """Write the scores and add their squares to the energies; False where it was left undone."""
    laid_out = _rows_whole(qk, scores, weights[:, None]) and energies.is_contiguous()
    native = library(_SOURCE) if laid_out else None
    if native is None:
        return False
    mask = _bytes(token_mask)
    sizes = _sizes(qk, weights, mask, scores, scores)
    _call(native.write_scores, sizes, qk, weights, mask, scores, energies)
    return True


def wrote_gradients(
    qk: Tensor,
    weights: Tensor,
    token_mask: Tensor | None,
    scores: Tensor,
    d_scores: Tensor | None,
    d_energies: Tensor | None,  # [b, 2, H, S]
    d_qk: Tensor,  # [b, n, 2, H, P], written
    d_weights: Tensor,  # [b, 2, H, S, P], transposed, added to
) -> bool:
    """Write the gradients of queries and keys, and add to those of the weights; or False."""
    if d_scores is None:
        return False
    laid_out = _rows_whole(qk, scores, d_scores, weights[:, None])
    laid_out = laid_out and d_qk.is_contiguous() and d_weights.is_contiguous()
    native = library(_SOURCE) if laid_out else None
    if native is None:
        return False
    mask = _bytes(token_mask)
    of_energies = None if d_energies is None else d_energies.contiguous()
    sizes = _sizes(qk, weights, mask, scores, d_scores)
    tensors = qk, weights, mask, scores, d_scores, of_energies, d_qk, d_weights
    _call(native.write_gradients, sizes, *tensors)
    return True


def _rows_whole(*tensors: Tensor) -> bool:
    """Whether all are of float32, and all that belongs to a token lies side by side."""
    return all(x.dtype == torch.float32 and x[:1, :1].is_contiguous() for x in tensors)


def _bytes(token_mask: Tensor | None) -> Tensor | None:
    return None if token_mask is None else token_mask.contiguous().view(torch.uint8)


def _sizes(
    qk: Tensor, weights: Tensor, mask: Tensor | None, scores: Tensor, d_scores: Tensor
) -> _Sizes:
    b, n, sides, H, P = qk.shape
    steps = (step for x in (qk, scores, d_scores) for step in x.stride()[:2])
    mask_step = 0 if mask is None else mask.stride(0)
    threads = torch.get_num_threads()
    shape = b, n, sides * H, P, weights.shape[-1]
    return _Sizes(*shape, *steps, weights.stride(0), mask_step, threads)


def _call(function: ctypes._NamedFuncPointer, sizes: _Sizes, *tensors: Tensor | None) -> None:
    pointers = (None if x is None else ctypes.c_void_p(x.data_ptr()) for x in tensors)
    function(ctypes.byref(sizes), *pointers)
