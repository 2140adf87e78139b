"""Plain PyTorch: ``nn.MultiheadAttention``, alone or in the Transformer layers.

Letters: B batch, N tokens, T source tokens, D model dim, H heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.patching.hosts.host import (
    Affine,
    Change,
    Host,
    PatchedAttention,
    Projections,
)
from primal_attention.patching.masks import context_mask_of, expanded, seen_by, token_mask_of


class TorchModules(Host):
    """Decoder layers get a causal self-attention; others are causal by option."""

    name = "torch.nn"

    def owns(self, module: nn.Module) -> bool:
        """Accept multi-head attention itself, no subclass."""
        return type(module) is nn.MultiheadAttention

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> Projections:
        """Cut the packed projection in three."""
        mha: Any = module
        _refuse(mha)
        q, k, v = Affine(mha.in_proj_weight, mha.in_proj_bias).split(3)
        parent = ancestors[-1]
        cross = self.is_cross(mha, parent)
        return Projections(
            q,
            k,
            v,
            Affine.of(mha.out_proj),
            num_heads=mha.num_heads,
            causal=isinstance(parent, nn.TransformerDecoderLayer) and not cross,
            cross=cross,
        )

    def is_cross(self, module: nn.Module, parent: nn.Module) -> bool:
        """Return whether it is the second attention of a decoder layer."""
        return isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> PatchedAttention:
        """Use the signature of multi-head attention."""
        return TorchAttention(mechanism, batch_first=bool(module.batch_first))

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[Change]:
        """Turn off nested tensors, which the encoder would pass to its layers in evaluation."""
        encoders = [each for each in ancestors if isinstance(each, nn.TransformerEncoder)]
        return [Change(encoder, "use_nested_tensor", False) for encoder in encoders]


class TorchAttention(PatchedAttention):
    """Attention called as ``(query, key, value, key_padding_mask, attn_mask)``.

    The attributes are those that a Transformer layer looks at before it takes its fused path in
    evaluation, which would go around this module; a missing bias tells it not to.
    """

    in_proj_bias = None
    _qkv_same_embed_dim = True

    def __init__(self, mechanism: nn.Module, *, batch_first: bool):
        super().__init__(mechanism)
        self.batch_first, self.num_heads = batch_first, int(mechanism.num_heads)  # type: ignore[arg-type]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Outputs in the layout of the inputs, and None: there are no attention weights.

        ``is_causal`` is a hint about ``attn_mask``, which is looked at instead.
        """
        if not _same(key, value):
            raise ValueError(
                "value must be the tensor passed as key: patched layers use one of them"
            )
        crossing = not _same(key, query)
        x, context = self._batched(query), self._batched(key)
        mask = _merged(attn_mask, key_padding_mask, x.shape[0], self.num_heads)
        if crossing:
            self.check_cross()
            y = self.mechanism(x, context, context_mask=expanded(context_mask_of(mask), context))
        else:
            if mask is None and self.causal:
                raise ValueError(
                    "this layer is causal but attn_mask is None, which asks for full attention; "
                    "pass the causal mask, or patch(..., causal=False)"
                )
            real = token_mask_of(mask, num_queries=x.shape[1], causal=self.causal)
            y = self.mechanism(x, token_mask=expanded(real, x))
        if query.ndim == 2:
            return y[0], None
        return y if self.batch_first else y.transpose(0, 1), None

    def _batched(self, z: Tensor) -> Tensor:
        if z.ndim == 2:
            return z[None]
        return z if self.batch_first else z.transpose(0, 1)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two arguments are one tensor, or two views of the same memory."""
    if one is other or torch.compiler.is_compiling():
        return one is other
    layout = [(t.data_ptr(), t.shape, t.stride()) for t in (one, other)]
    return layout[0] == layout[1]


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch_size: int, num_heads: int
) -> Tensor | None:
    """The keys that each query sees, [B or 1, H or 1, N or 1, T]; True in a bool mask hides."""
    seen = None
    if attn_mask is not None:
        seen = _seen(attn_mask)
        shape = (1, 1) if attn_mask.ndim == 2 else (batch_size, num_heads)
        seen = seen.view(*shape, *attn_mask.shape[-2:])
    if key_padding_mask is not None:
        real = _seen(key_padding_mask).view(-1, 1, 1, key_padding_mask.shape[-1])
        seen = real if seen is None else seen & real
    return seen


def _seen(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else seen_by(mask)


def _refuse(mha: Any) -> None:
    if mha.in_proj_weight is None:
        raise ValueError(
            f"MultiheadAttention with kdim={mha.kdim}, vdim={mha.vdim} other than its embed_dim="
            f"{mha.embed_dim} cannot be patched"
        )
    if mha.bias_k is not None or mha.add_zero_attn:
        raise ValueError("MultiheadAttention with add_bias_kv or add_zero_attn cannot be patched")
