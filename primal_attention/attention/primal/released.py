"""Reading layers that were trained with the authors' released code.

That code has one layer class a domain, each with its own parameter names. Layers of the time
series, long sequence and image code sample tokens; those of the reinforcement learning and language
code are causal with data-independent weights.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ours -> theirs, in the five released codes
_NAMES = {
    "q_proj": ("query_projection", "W_q", "q_proj"),
    "k_proj": ("key_projection", "W_k", "k_proj"),
    "out_proj": ("out_projection", "ff", "out_proj", "proj"),
    "score_proj": ("inner_attention.concate_weight", "attn.concate_weight", "concate_weight"),
    "w_e": ("We", "we"),
    "w_r": ("Wr", "wr"),
    "lambda_diag": ("inner_attention.Lambda", "attn.Lambda", "Lambda"),
}
_SAMPLED = ("inner_attention.Lambda", "attn.Lambda", "we")  # only layers that sample have these


class ReleasedLayer(NamedTuple):
    """A released layer in our terms."""

    options: dict[str, Any]  # of our constructor
    parameters: dict[str, Tensor]  # by our names, w_e [H, M, S]
    lambda_diag: Tensor  # [H, S] = |Lambda|: their loss only ever uses the square


def read_released(state_dict: Mapping[str, Tensor]) -> ReleasedLayer:
    """Rename the parameters of one released layer (keys without the prefix of the layer)."""
    given = dict(state_dict)
    _split_packed(given)
    parameters: dict[str, Tensor] = {}
    for ours, theirs in _NAMES.items():
        for suffix in ("", ".weight", ".bias"):
            found = [given[name + suffix] for name in theirs if name + suffix in given]
            if found:
                parameters[ours + suffix] = found[0]
    needed = {name if name[0] in "wl" else f"{name}.weight" for name in _NAMES}
    missing = sorted(needed - parameters.keys())
    if missing:
        raise ValueError(
            f"state_dict is not that of one released Primal layer: found no {', '.join(missing)} "
            f"among its keys {sorted(state_dict)}"
        )
    lambda_diag = parameters.pop("lambda_diag").abs()
    return ReleasedLayer(_options(given, parameters), parameters, lambda_diag)


def _options(given: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    H, M, S = parameters["w_e"].shape
    sampled = any(name in given for name in _SAMPLED)
    return {
        "dim": parameters["q_proj.weight"].shape[1],
        "num_heads": H,
        "num_directions": S,
        "weights": "sampled" if sampled else "static",
        "causal": not sampled,
        "max_tokens": M,
        "samples_per_direction": math.ceil(M / S),
    }


def _split_packed(given: dict[str, Tensor]) -> None:
    """The image code packs q and k in one projection."""
    for kind in ("weight", "bias"):
        packed = given.pop(f"qk.{kind}", None)
        if packed is not None:
            given[f"q_proj.{kind}"], given[f"k_proj.{kind}"] = torch.chunk(packed, 2)
