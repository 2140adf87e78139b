"""Attention layers [B, N, D] -> [B, N, D] and the registry that builds them by name."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.validation import check_choice
from primal_attention.attention.baselines.cosformer import CosformerAttention
from primal_attention.attention.baselines.flow import FlowAttention
from primal_attention.attention.baselines.linear import LinearAttention
from primal_attention.attention.baselines.linformer import LinformerAttention
from primal_attention.attention.baselines.longformer import LongformerAttention
from primal_attention.attention.baselines.nystrom import NystromAttention
from primal_attention.attention.baselines.performer import PerformerAttention
from primal_attention.attention.baselines.reformer import ReformerAttention
from primal_attention.attention.baselines.soft import SoftAttention
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.baselines.sparse import SparseAttention
from primal_attention.attention.baselines.yoso import YosoAttention
from primal_attention.attention.primal import PrimalAttention, PrimalTimeAttention
from primal_attention.attention.svr.mechanisms import (
    LinearBNAttention,
    SoftmaxBNAttention,
    SoftmaxBNSHAttention,
    SoftmaxSHAttention,
)

ATTENTIONS: dict[str, type[nn.Module]] = {
    "primal": PrimalAttention,
    "primal_time": PrimalTimeAttention,
    "softmax": SoftmaxAttention,
    "softmax_bn": SoftmaxBNAttention,
    "softmax_sh": SoftmaxSHAttention,
    "softmax_bn_sh": SoftmaxBNSHAttention,
    "linear": LinearAttention,
    "linear_bn": LinearBNAttention,
    "performer": PerformerAttention,
    "linformer": LinformerAttention,
    "nystrom": NystromAttention,
    "reformer": ReformerAttention,
    "longformer": LongformerAttention,
    "yoso": YosoAttention,
    "cosformer": CosformerAttention,
    "soft": SoftAttention,
    "flow": FlowAttention,
    "sparse": SparseAttention,
}


def build_attention(name: str, dim: int, num_heads: int, **options: Any) -> nn.Module:
    """Build the mechanism of that name; an option it does not have is a TypeError."""
    check_choice("name", name, ATTENTIONS)
    known = options_of(name)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    unknown = [] if takes_any else [option for option in options if option not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise TypeError(f"{name} has no option {unknown[0]!r}{hint} It has {', '.join(known)}")
    return ATTENTIONS[name](dim, num_heads, **options)


def card_of(name: str) -> Mechanism:
    """Return what a mechanism is and can do."""
    card: Mechanism = getattr(ATTENTIONS[name], "mechanism", Mechanism("unknown", "unknown"))
    return card


def options_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the options of a mechanism's constructor."""
    parameters = dict(inspect.signature(ATTENTIONS[name]).parameters)
    del parameters["dim"], parameters["num_heads"]
    return parameters


__all__ = ["ATTENTIONS", "PrimalAttention", "build_attention", "card_of", "options_of"]
