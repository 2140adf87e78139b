"""A = W_{e|X} C: the weights of a layer and its output map as one matrix for each side."""

from primal_attention.ops.collapse.composed import collapse

__all__ = ["collapse"]
