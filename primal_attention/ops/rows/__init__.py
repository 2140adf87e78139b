"""Rows of a tensor put in another order, with room between them."""

from primal_attention.ops.rows.moved import moved

__all__ = ["moved"]
