"""The vision transformers of timm that share its plain attention: ViT, DeiT and relatives."""

from typing import Any

from torch import Tensor, fx, nn

from primal_attention.patching.hosts import host
from primal_attention.patching.masks import expanded, token_mask_of


class TimmViT(host.Host):
    """``qkv`` holds queries, keys and values."""

    name = "timm"

    def owns(self, module: nn.Module) -> bool:
        """Accept the attention of ``timm.layers``."""
        kind = type(module)
        return (kind.__module__, kind.__name__) == ("timm.layers.attention", "Attention")

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Cut the packed projection in three."""
        attention: Any = module
        _refuse(attention)
        q, k, v = host.Affine.of(attention.qkv).split(3)
        return host.Projections(
            q.scaled(host.score_factor(attention.scale, attention.head_dim)),
            k,
            v,
            host.Affine.of(attention.proj),
            num_heads=attention.num_heads,
            dropout=attention.proj_drop.p,
            max_tokens=next(filter(None, map(_num_tokens, ancestors)), None),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Use the signature of timm."""
        return TimmAttention(mechanism)


class TimmAttention(host.PatchedAttention):
    """Attention called as ``(x, attn_mask, is_causal)``."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attention outputs [B, N, D]; one node of the graph where ``torch.fx`` traces a model."""
        if isinstance(x, fx.Proxy):
            path = x.tracer.path_of_module(self)
            options = (x, attn_mask, is_causal)
            return x.tracer.create_proxy("call_module", path, options, {})
        if is_causal and not self.causal:
            raise ValueError("is_causal=True: this layer is not causal; patch(..., causal=True)")
        mask = attn_mask if attn_mask is None or attn_mask.ndim == 4 else attn_mask[None, None]
        real = token_mask_of(mask, num_queries=x.shape[1], causal=self.causal)
        y: Tensor = self.mechanism(x, token_mask=expanded(real, x))
        return y


def _num_tokens(model: Any) -> int | None:
    """Patches and class tokens of a vision transformer; None of other modules and open sizes."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    if getattr(model, "dynamic_img_size", False) or not isinstance(patches, int):
        return None
    return patches + int(getattr(model, "num_prefix_tokens", 0))


def _refuse(attention: Any) -> None:
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(attention, name, None), nn.Identity | None):
            raise ValueError(
                f"timm attention with {name} ({getattr(attention, name)}) is not known"
            )
    if getattr(attention, "gate", None) is not None:
        raise ValueError("timm attention with a gate is not known")
    if attention.proj.out_features != attention.qkv.in_features:
        raise ValueError("timm attention with an output of another dimension is not known")
