"""An affine map whose bias gets its gradient, a sum of columns, at the speed of the memory."""

from primal_attention.ops.linear.eager import linear

__all__ = ["linear"]
