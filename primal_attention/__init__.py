"""Attention as a kernel machine: Primal-Attention, its objectives and its contract."""

from primal_attention.attention import ATTENTIONS, PrimalAttention, build_attention
from primal_attention.objectives import ksvd_loss, record_ksvd
from primal_attention.patching import PrimalMultiheadAttention, patch, plan, unpatch
from primal_attention.pretrained import teach_transformers
from primal_attention.theory import KernelSVD

__version__ = "0.1.0.dev0"

__all__ = [
    "ATTENTIONS",
    "KernelSVD",
    "PrimalAttention",
    "PrimalMultiheadAttention",
    "build_attention",
    "ksvd_loss",
    "patch",
    "plan",
    "record_ksvd",
    "unpatch",
]

teach_transformers()
