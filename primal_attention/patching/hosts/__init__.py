"""The foreign models that can be patched, one :class:`Host` a family."""

from primal_attention.patching.hosts.host import Host
from primal_attention.patching.hosts.timm_vit import TimmViT
from primal_attention.patching.hosts.torch_modules import TorchModules
from primal_attention.patching.hosts.transformers_families import FAMILIES

HOSTS: list[Host] = [*FAMILIES, TorchModules(), TimmViT()]


def register_host(host: Host) -> None:
    """Make a family of attention modules known to ``patch``, ``plan`` and ``load_patched``.

    It is asked before the families known so far, and replaces one of the same name.

    Args:
        host: Its ``owns`` recognises the modules, ``read`` gives their projections, and ``adapt``
            puts a mechanism behind their signature.
    """
    if not isinstance(host, Host):
        raise ValueError(f"host must be an instance of a subclass of Host, got {host!r}")
    HOSTS[:] = [host, *(each for each in HOSTS if each.name != host.name)]


__all__ = ["HOSTS", "Host", "register_host"]
