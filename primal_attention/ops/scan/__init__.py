"""The causal scan: every token reads the sum of all moments up to itself."""

from primal_attention.ops.scan.chunked import scan
from primal_attention.ops.scan.reference import ScanResult

__all__ = ["ScanResult", "scan"]
