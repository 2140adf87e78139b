"""Running means over the real tokens: what makes Primal-Attention with static weights causal."""

from primal_attention.ops.running_mean.chunked import running_mean
from primal_attention.ops.running_mean.reference import RunningMean, token_counts

__all__ = ["RunningMean", "running_mean", "token_counts"]
