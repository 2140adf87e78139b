"""All fused forms in Triton, by the names of the ops."""

from primal_attention.ops.causal.fused_scan import ScanOp
from primal_attention.ops.landmarks.fused import LandmarkIndexOp
from primal_attention.ops.layer.fused import LayerOp
from primal_attention.ops.objective.fused import MeanJOp
from primal_attention.ops.op import FusedOp
from primal_attention.ops.primal.fused import PrimalOp
from primal_attention.ops.primal.fused_moment import MomentOp

_KINDS = LandmarkIndexOp, LayerOp, MeanJOp, MomentOp, PrimalOp, ScanOp
OPS: dict[str, FusedOp] = {op.name: op for op in (kind() for kind in _KINDS)}
