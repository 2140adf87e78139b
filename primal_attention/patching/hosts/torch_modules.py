"""Plain PyTorch: ``nn.MultiheadAttention``, alone or in the Transformer layers.

Letters: B batch, N tokens, T source tokens, D model dim, H heads.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from primal_attention.attention import ATTENTIONS, build_attention, card_of
from primal_attention.attention.base.validation import check_choice
from primal_attention.patching.hosts import host
from primal_attention.patching.masks import context_mask_of, expanded, seen_by, token_mask_of


class TorchModules(host.Host):
    """Decoder layers get a causal self-attention; others are causal by option."""

    name = "torch.nn"

    def owns(self, module: nn.Module) -> bool:
        """Accept multi-head attention itself, no subclass."""
        return type(module) is nn.MultiheadAttention

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Cut the packed projection in three."""
        mha: Any = module
        _refuse(mha)
        q, k, v = host.Affine(mha.in_proj_weight, mha.in_proj_bias).split(3)
        parent = ancestors[-1]
        cross = self.is_cross(mha, parent)
        return host.Projections(
            q,
            k,
            v,
            host.Affine.of(mha.out_proj),
            num_heads=mha.num_heads,
            causal=isinstance(parent, nn.TransformerDecoderLayer) and not cross,
            cross=cross,
        )

    def is_cross(self, module: nn.Module, parent: nn.Module) -> bool:
        """Return whether it is the second attention of a decoder layer."""
        return isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Use the signature of multi-head attention."""
        layer = PrimalMultiheadAttention(
            int(module.embed_dim),  # type: ignore[arg-type]
            int(module.num_heads),  # type: ignore[arg-type]
            batch_first=bool(module.batch_first),
            attention=mechanism,
        )
        layer.needs_causal_mask = True
        return layer

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[host.Change]:
        """Turn off nested tensors, which the encoder would pass to its layers in evaluation."""
        encoders = [each for each in ancestors if isinstance(each, nn.TransformerEncoder)]
        return [host.Change(encoder, "use_nested_tensor", False) for encoder in encoders]


class PrimalMultiheadAttention(host.PatchedAttention):
    """``nn.MultiheadAttention`` with a mechanism of the registry inside.

    Queries, keys and values that are one tensor, in compiled graphs one object, mean
    self-attention; another tensor, passed as key and as value, means cross-attention. The layer
    can be ``self_attn`` of an ``nn.TransformerEncoderLayer``, whose fused path in evaluation is
    then off. ``patch`` puts it in the place of ``nn.MultiheadAttention``.

    Args:
        embed_dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
        batch_first: Tokens are [B, N, D], otherwise [N, B, D].
        attention: A name of ``ATTENTIONS``, or a layer that is built already.
        causal: Each token sees itself and those before it, with or without a causal ``attn_mask``.
        device: Where the parameters are; ``"meta"`` allocates none.
        dtype: The dtype of the parameters.
        **options: Options of the mechanism. Causal primal attention has ``weights="auto"`` by
            default.
    """

    # A Transformer layer looks at these before it takes its fused path in evaluation, which would
    # go around this module; a missing bias tells it not to.
    in_proj_bias = None
    _qkv_same_embed_dim = True
    needs_causal_mask = False  # in a host, which passes a causal mask to what is causal
    contract_exemptions: ClassVar[dict[str, str]] = {
        "cross-attention": "no argument says which queries are padding"
    }

    def __init__(  # noqa: PLR0913 - the signature of nn.MultiheadAttention
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        attention: str | nn.Module = "primal",
        causal: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        if isinstance(attention, str):
            check_choice("attention", attention, ATTENTIONS)
            if causal:
                options = {**card_of(attention).causal_patch, **options}
            options |= {"dropout": dropout, "bias": bias, "causal": causal}
            with nullcontext() if device is None else torch.device(device):
                attention = build_attention(attention, embed_dim, num_heads, **options)
        super().__init__(attention if dtype is None else attention.to(dtype))
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attention outputs in the layout of the inputs, and None in place of weights.

        Args:
            query: Tokens [B, N, D], or [N, B, D] without ``batch_first``, or [N, D].
            key: Tokens that are attended to; the query where None.
            value: The same tensor as the key; the key where None.
            key_padding_mask: True at padding, [B, T] or [T]; or 0 at real tokens and -inf at
                padding, which is what Transformer layers make of it.
            need_weights: Refused where True: there are no weights to return.
            attn_mask: A causal mask where the layer is causal; nothing else can be honoured.
            average_attn_weights: Ignored.
            is_causal: A hint about ``attn_mask``, which is looked at instead.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check(query, key, value, need_weights=need_weights)
        x, context = self._batched(query), self._batched(key)
        shape = tuple(context.shape[3 - key.ndim : 2])
        if key_padding_mask is not None and key_padding_mask.shape != shape:
            raise ValueError(
                f"key_padding_mask must be {shape}, one entry for each key, got "
                f"{tuple(key_padding_mask.shape)}"
            )
        seen = self._seen_keys(attn_mask, key_padding_mask, *context.shape[:2])
        if not _same(key, query):
            self.check_cross()
            y = self.mechanism(x, context, context_mask=expanded(context_mask_of(seen), context))
        else:
            if attn_mask is None:
                seen = self._without_mask(seen, is_causal=is_causal)
            real = token_mask_of(seen, num_queries=x.shape[1], causal=self.causal)
            y = self.mechanism(x, token_mask=expanded(real, x))
        if query.ndim == 2:
            return y[0], None
        return y if self.batch_first else y.transpose(0, 1), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool) -> None:
        if need_weights:
            raise ValueError(
                "need_weights=True: a mechanism without a matrix of scores has no weights to "
                "return; pass need_weights=False, and see primal_attention.analysis.spectrum"
            )
        if not _same(key, value):
            raise ValueError(
                "value must be the tensor passed as key: the layer makes keys and values of one"
            )
        if query.ndim not in (2, 3) or key.ndim != query.ndim:
            raise ValueError(
                "query and key must both have 2 dimensions, or 3 with a batch; got "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )

    def _without_mask(self, seen: Tensor | None, *, is_causal: bool) -> Tensor | None:
        """The padding [B, T] of a self-attention without ``attn_mask``."""
        if is_causal and not self.causal:
            raise ValueError(
                "is_causal=True: this layer is not causal; build or patch it with causal=True"
            )
        if self.causal and self.needs_causal_mask:
            raise ValueError(
                "this layer is causal but attn_mask is None, which asks for full attention; "
                "pass the causal mask, or patch(..., causal=False)"
            )
        return None if seen is None else seen[:, 0, 0]

    def _seen_keys(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, B: int, T: int
    ) -> Tensor | None:
        """The keys that each query sees, [B or 1, H or 1, N or 1, T]; None where all."""
        seen = None
        if attn_mask is not None:
            shape = (1, 1) if attn_mask.ndim == 2 else (B, self.num_heads)
            seen = _seen("attn_mask", attn_mask).view(*shape, *attn_mask.shape[-2:])
        if key_padding_mask is not None:
            real = _seen("key_padding_mask", key_padding_mask).view(B, 1, 1, T)
            seen = real if seen is None else seen & real
        return seen

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


def _seen(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool, True where hidden, got {mask.dtype}")
    return seen_by(mask)


def _refuse(mha: Any) -> None:
    if mha.in_proj_weight is None:
        raise ValueError(
            f"MultiheadAttention with kdim={mha.kdim}, vdim={mha.vdim} other than its embed_dim="
            f"{mha.embed_dim} cannot be patched"
        )
    if mha.bias_k is not None or mha.add_zero_attn:
        raise ValueError("MultiheadAttention with add_bias_kv or add_zero_attn cannot be patched")
