"""The moment of features and values, Phi^T H: how dual variables become primal weights."""

from primal_attention.ops.moment.chunked import moment

__all__ = ["moment"]
