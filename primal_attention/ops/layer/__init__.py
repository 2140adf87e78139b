"""All of a Primal layer between its tokens and its output projection."""

from primal_attention.ops.layer.eager import LayerInputs, LayerResult, fused_layer, layer

__all__ = ["LayerInputs", "LayerResult", "fused_layer", "layer"]
