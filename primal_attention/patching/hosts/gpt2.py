"""GPT-2, and the one inside the Decision Transformer: packed, transposed projections."""

from typing import Any

from torch import nn

from primal_attention.patching.adapter import PatchedAttention
from primal_attention.patching.hosts.host import Host
from primal_attention.patching.hosts.transformers_attention import TransformersAttention
from primal_attention.patching.hosts.transformers_families import max_tokens
from primal_attention.patching.projections import Affine, Parts, check_plain, score_factor

_CLASSES = {"GPT2Attention", "DecisionTransformerGPT2Attention"}


class GPT2(Host):
    """``c_attn`` holds queries, keys and values; the residual dropout is the attention's."""

    name = "GPT-2"

    def owns(self, module: nn.Module) -> bool:
        """The self-attentions; those to an encoder have a projection of another shape."""
        return type(module).__name__ in _CLASSES and not module.is_cross_attention

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> Parts:
        """The packed projection, cut in three and turned."""
        attention: Any = module
        q, k, v = _affine(attention.c_attn).split(3)
        return Parts(
            q.scaled(score_factor(attention.scaling, attention.head_dim)),
            k,
            v,
            _affine(attention.c_proj),
            num_heads=attention.num_heads,
            causal=True,
            dropout=attention.resid_dropout.p,
            max_tokens=max_tokens(attention.config),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> PatchedAttention:
        """The common adapter of transformers."""
        return TransformersAttention.of(module, mechanism)


def _affine(conv1d: Any) -> Affine:
    from transformers.pytorch_utils import Conv1D

    check_plain(conv1d, Conv1D)
    return Affine(conv1d.weight.mT, conv1d.bias)
