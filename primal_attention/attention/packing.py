"""Projections that are plain affine maps: all in one product of matrices, or one by its own op."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from primal_attention.ops.column_sum import linear
from primal_attention.ops.products import is_large_on_cpu
from primal_attention.precision import has_autocast

_MANY = 1 << 24  # multiplications of one projection
_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))  # others have arithmetic of their own


class PackedProjection(NamedTuple):
    """The parameters one below the other, in the dtype in which the tokens are projected."""

    weight: Tensor  # [R, D]
    bias: Tensor | None  # [R]


def packed_projection(x: Tensor, *projections: nn.Module) -> PackedProjection | None:
    """The projections of x one below the other, or None where the modules must be called.

    They are called where one is no plain ``nn.Linear``, as after quantisation or with adapters,
    or has hooks. Without gradients there is nothing to gain: it is the backward pass that becomes
    shorter.
    """
    plain = [each for each in projections if is_plain(each)]
    if not torch.is_grad_enabled() or len(plain) < len(projections):
        return None
    weights: list[Tensor] = [each.weight for each in plain]
    biases: list[Tensor] = [each.bias for each in plain if each.bias is not None]
    dtype = projected_dtype(x, weights[0])
    if dtype is None or not _alike(weights) or len(biases) not in (0, len(weights)):
        return None
    bias = torch.cat(biases).to(dtype) if biases else None
    return PackedProjection(torch.cat(weights).to(dtype), bias)


def projected(x: Tensor, projection: nn.Module) -> Tensor:
    """The projection of x; with gradients, by the op with the quicker products and sums."""
    if torch.is_grad_enabled() and is_plain(projection):
        weight, bias = projection.weight, projection.bias
        dtype = projected_dtype(x, weight)
        if dtype is not None and bias is not None and _gains(x, weight):
            return linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
    y: Tensor = projection(x)
    return y


def projected_rows(x: Tensor, projection: PackedProjection) -> Tensor:
    """What a packed projection makes of x, in whose dtype it is."""
    if projection.bias is None:
        return F.linear(x, projection.weight)
    return linear(x, projection.weight, projection.bias)


def _gains(x: Tensor, weight: Tensor) -> bool:
    """Whether the op is quicker; the compiler has quick products of its own on a CPU."""
    return x.is_cuda or (not torch.compiler.is_compiling() and is_large_on_cpu(x, weight))


def is_one_map(x: Tensor, score_proj: nn.Module, out_proj: nn.Module) -> bool:
    """Whether both projections of the scores may be one, which saves a CPU multiplications."""
    if not (is_plain(score_proj) and is_plain(out_proj)):
        return False
    alike = out_proj.weight.dtype == score_proj.weight.dtype
    return alike and is_work_of_cpu(x, out_proj.weight)


def is_work_of_cpu(x: Tensor, weight: Tensor) -> bool:
    """Whether multiplications take most of the time: many of them, in float32, not compiled."""
    on_cpu = x.is_cpu and x.dtype == weight.dtype == torch.float32
    many = x.numel() * weight.shape[0] >= _MANY
    return on_cpu and many and not torch.compiler.is_compiling()


def score_projection(
    score_proj: nn.Linear, out_proj: nn.Linear, num_heads: int
) -> PackedProjection:
    """The map of each head's scores and the output projection as one, of scores [B, N, 2 H S]."""
    heads = torch.unflatten(out_proj.weight, 1, (num_heads, -1))  # [D, H, C]
    mapped = torch.unflatten(heads @ score_proj.weight, 2, (2, -1))  # [D, H, 2, S]
    shift: Tensor | None = out_proj.bias
    if score_proj.bias is not None:
        of_heads = heads.sum(1) @ score_proj.bias
        shift = of_heads if shift is None else of_heads + shift
    return PackedProjection(mapped.transpose(1, 2).flatten(1), shift)


def in_projected_dtype(x: Tensor, *projections: nn.Module) -> Tensor:
    """The tokens in the dtype in which autocast would have them, once for all projections.

    As they are where one is no plain ``nn.Linear``: it may have been made for another dtype.
    """
    if not has_autocast(x.device):
        return x
    plain = [each for each in projections if is_plain(each)]
    dtype = projected_dtype(x, plain[0].weight) if len(plain) == len(projections) else None
    return x if dtype is None else x.to(dtype)


def projected_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of a product of the two, as autocast has it; None where it would be refused."""
    if has_autocast(x.device) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype if x.dtype == weight.dtype else None


def _alike(weights: list[Tensor]) -> bool:
    """Whether they are of one kind."""
    return len({(each.dtype, each.device) for each in weights}) == 1


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is nn.Linear itself, and calling it does nothing else.

    Adapters, quantisation and parametrisation make another class of it, or its weight of another
    kind; offloading replaces its ``forward``.
    """
    plain = type(module) is nn.Linear and has_plain_call(module)
    return plain and type(module.weight) in _PLAIN_TENSORS


def has_plain_call(module: nn.Module) -> bool:
    """Whether a call of the module is the forward pass of its class and nothing else."""
    return (
        not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
        and "forward" not in module.__dict__
        and not of_all_modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def outputs_of(projection: nn.Module) -> Tensor:
    """An empty tensor of the dtype of a projection, on the device where it runs."""
    weight: Any = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor):  # a method after quantisation, none in a module of its own
        tensors = (*projection.parameters(), *projection.buffers())
        weight = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    hook = getattr(projection, "_hf_hook", None)  # accelerate, whose weights may be elsewhere
    device = getattr(hook, "execution_device", None)
    return torch.empty(0, dtype=dtype, device=weight.device if device is None else device)
