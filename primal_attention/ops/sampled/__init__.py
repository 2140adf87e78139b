"""Data-dependent weights from landmarks: W_{e|X} = X'^T w_e, W_{r|X} and what they collapse to."""

from primal_attention.ops.sampled.composed import sampled_weights
from primal_attention.ops.sampled.reference import SampledWeights

__all__ = ["SampledWeights", "sampled_weights"]
