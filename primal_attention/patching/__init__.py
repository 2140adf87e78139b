"""Replace attention inside models that exist: Hugging Face transformers, timm, plain PyTorch."""

from primal_attention.patching.distill import DistillReport, distill
from primal_attention.patching.hosts import register_host
from primal_attention.patching.hosts.host import Affine, Host, PatchedAttention, Projections
from primal_attention.patching.hosts.torch_modules import PrimalMultiheadAttention
from primal_attention.patching.integrations import lora_config, trainer_callback
from primal_attention.patching.patch import patch, unpatch
from primal_attention.patching.plan import Plan, plan
from primal_attention.patching.saving import load_patched, save_patched

__all__ = [
    "Affine",
    "DistillReport",
    "Host",
    "PatchedAttention",
    "Plan",
    "PrimalMultiheadAttention",
    "Projections",
    "distill",
    "load_patched",
    "lora_config",
    "patch",
    "plan",
    "register_host",
    "save_patched",
    "trainer_callback",
    "unpatch",
]
