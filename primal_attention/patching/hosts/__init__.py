"""The foreign models that can be patched, one description a family."""

from primal_attention.patching.hosts.gpt2 import GPT2
from primal_attention.patching.hosts.host import Host
from primal_attention.patching.hosts.timm_vit import TimmViT
from primal_attention.patching.hosts.torch_modules import TorchModules
from primal_attention.patching.hosts.transformers_families import SEPARATE

HOSTS: tuple[Host, ...] = (*SEPARATE, GPT2(), TorchModules(), TimmViT())

__all__ = ["HOSTS", "Host"]
