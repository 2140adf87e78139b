"""All of a Primal layer, from its tokens to its outputs."""

from primal_attention.ops.layer.eager import LayerInputs, LayerResult, fused_layer, layer

__all__ = ["LayerInputs", "LayerResult", "fused_layer", "layer"]
