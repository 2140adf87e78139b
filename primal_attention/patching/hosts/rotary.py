"""Decoders with rotary positions and grouped keys: what happens between projection and feature map.

Letters: B batch, N tokens, H heads, C head dim, G key heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from primal_attention.patching.hosts.rotation import running_rotation
from primal_attention.patching.hosts.transformers_attention import TransformersAttention

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_global", "k_global", "v_global")


class HeadProjection:
    """What the mechanism calls as one of its projections; the module itself is the owner's."""

    def __init__(self, owner: RotaryAttention, name: str):
        self.owner, self.name = owner, name

    @property
    def weight(self) -> Tensor:
        """A weight of the shape [H C, D] that a projection without groups has."""
        weight: Tensor = self.owner.get_submodule("q_proj").weight  # type: ignore[assignment]
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadProjection:
        """Of the copy of the owner where it is copied too; else of the owner itself."""
        return HeadProjection(memo.get(id(self.owner), self.owner), self.name)

    def __call__(self, x: Tensor) -> Tensor:
        """The projected tokens [B, N, H C]."""
        return self.owner.project(self.name, x)


class RotaryAttention(TransformersAttention):
    """The projections under the names of the host, then norms, rotation and groups as it has them.

    The mechanism sees queries and keys after all of this, before its feature map.
    """

    def __init__(self, mechanism: nn.Module, module: nn.Module):
        super().__init__(mechanism, module.layer_idx)  # type: ignore[arg-type]
        self.num_heads, self.head_dim = int(mechanism.num_heads), int(mechanism.head_dim)  # type: ignore[arg-type]
        keys: Any = module.get_submodule("k_proj")
        self.num_key_heads = int(keys.out_features) // self.head_dim
        code = sys.modules[type(module).__module__]
        self._rotate: Callable[..., tuple[Tensor, Tensor]] = code.apply_rotary_pos_emb
        for name in ("q_norm", "k_norm"):
            if hasattr(module, name):
                self.add_module(name, deepcopy(module.get_submodule(name)))
        for name in _PROJECTIONS:
            if hasattr(mechanism, name):
                self.add_module(name, mechanism.get_submodule(name))
                delattr(mechanism, name)
                setattr(mechanism, name, HeadProjection(self, name))

    @classmethod
    def of(cls, module: nn.Module, mechanism: nn.Module) -> RotaryAttention:
        """With the norms and the rotation of the host."""
        return cls(mechanism, module)

    def project(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values [B, N, H C] as the mechanism gets them."""
        z: Tensor = rearrange(self.get_submodule(name)(x), "b n (h c) -> b h n c", c=self.head_dim)
        if not name.startswith("v"):
            norm = f"{name[0]}_norm"
            z = getattr(self, norm)(z) if hasattr(self, norm) else z
            rotation = running_rotation()
            assert rotation is not None
            z, _ = self._rotate(z, z[:, :0], *rotation)
        z = z.repeat_interleave(self.num_heads // z.shape[1], dim=1)
        return rearrange(z, "b h n c -> b n (h c)")
