"""Causal sums over the tokens: running means and scans."""

from primal_attention.ops.causal.eager import running_mean, scan, token_counts

__all__ = ["running_mean", "scan", "token_counts"]
