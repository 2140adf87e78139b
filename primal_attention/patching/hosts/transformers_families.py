"""Hugging Face models with one projection each for queries, keys, values and output."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from primal_attention.patching.adapter import Change, PatchedAttention
from primal_attention.patching.hosts.host import Host
from primal_attention.patching.hosts.parallel_plan import plans_without
from primal_attention.patching.hosts.rotary import RotaryAttention
from primal_attention.patching.hosts.transformers_attention import TransformersAttention
from primal_attention.patching.projections import Affine, Parts, score_factor


@dataclass(frozen=True)
class SeparateProjections(Host):
    """A family by the class names of its attentions and the names of their projections."""

    name: str
    classes: frozenset[str]
    projections: tuple[str, str, str, str]  # q, k, v, out; out from the parent if taken over
    takes_over: tuple[str, ...] = ()
    adapter: type[TransformersAttention] = TransformersAttention

    def owns(self, module: nn.Module) -> bool:
        """By the name of its class, in a module of transformers."""
        kind = type(module)
        return kind.__name__ in self.classes and kind.__module__.startswith("transformers.models.")

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> Parts:
        """Its four projections; grouped keys stay grouped."""
        config: Any = module.config
        head_dim = int(_first(module, "attention_head_size", "head_dim"))
        q, k, v = (Affine.of(module.get_submodule(name)) for name in self.projections[:3])
        holder = ancestors[-1] if self.takes_over else module
        out = Affine.of(holder.get_submodule(self.projections[3]))
        _refuse_sliding_window(module, config)
        _refuse_odd_heads(module, q, out)
        factor = score_factor(float(module.scaling), head_dim)  # type: ignore[arg-type]
        if factor != 1.0 and hasattr(module, "q_norm"):
            raise ValueError(f"{type(module).__name__} scales its normalised queries by {factor}")
        return Parts(
            q.scaled(factor),
            k,
            v,
            out,
            num_heads=q.weight.shape[0] // head_dim,
            causal=bool(module.is_causal) and getattr(config, "is_causal", None) is not False,
            dropout=getattr(getattr(module, "output_dropout", None), "p", 0.0),
            max_tokens=max_tokens(config),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> PatchedAttention:
        """The adapter of the family."""
        return self.adapter.of(module, mechanism)

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[Change]:
        """No plan for the projections of the host."""
        return plans_without(module, ancestors)


class AlbertAttention(TransformersAttention):
    """An attention that adds its input and normalises the sum by itself."""

    def __init__(self, mechanism: nn.Module, norm: nn.Module):
        super().__init__(mechanism, None)
        self.norm = norm

    @classmethod
    def of(cls, module: nn.Module, mechanism: nn.Module) -> AlbertAttention:
        """With the norm of the host."""
        return cls(mechanism, deepcopy(module.get_submodule("LayerNorm")))

    def forward(self, hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None]:
        """The normalised sum of input and attention."""
        y, _ = super().forward(hidden_states, *args, **others)
        return self.norm(hidden_states + y), None


def max_tokens(config: Any) -> int | None:
    """The longest input by a config: its table of positions, or the patches of its images."""
    length = getattr(config, "max_position_embeddings", None)
    if length is not None:
        return int(length)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if not isinstance(image, int) or not isinstance(patch, int):
        return None
    return (image // patch) ** 2 + 2  # a class token, and DeiT's distillation token


def _first(module: nn.Module, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _refuse_sliding_window(module: nn.Module, config: Any) -> None:
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is not None and types[module.layer_idx] != "sliding_attention":
        return
    if window is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {window} tokens, which no mechanism "
            "honours; set config.sliding_window = None, or patch other layers"
        )


def _refuse_odd_heads(module: nn.Module, q: Affine, out: Affine) -> None:
    if q.weight.shape[0] != out.weight.shape[0]:
        raise ValueError(
            f"{type(module).__name__} has heads of {q.weight.shape[0]} channels in all in a model "
            f"of dimension {out.weight.shape[0]}; only equal numbers can be patched"
        )


_BERT = frozenset(
    f"{name}SelfAttention"
    for name in (
        "Bert",
        "BertGeneration",
        "Camembert",
        "Data2VecText",
        "Electra",
        "Ernie",
        "RoCBert",
        "Roberta",
        "RobertaPreLayerNorm",
        "XLMRoberta",
        "XLMRobertaXL",
        "Xmod",
    )
)
_VIT = frozenset(f"{name}Attention" for name in ("AST", "DeiT", "IJepa", "ViT", "ViTMAE", "ViTMSN"))
_LLAMA = frozenset(
    f"{name}Attention"
    for name in (
        "Arcee",
        "EuroBert",
        "Gemma",
        "Granite",
        "Helium",
        "Llama",
        "Mistral",
        "Mixtral",
        "Qwen2",
        "Qwen3",
    )
)
_NAMED = ("q_proj", "k_proj", "v_proj", "o_proj")
SEPARATE = (
    SeparateProjections(
        "BERT", _BERT, ("query", "key", "value", "output.dense"), ("output.dense",)
    ),
    SeparateProjections(
        "DistilBERT",
        frozenset({"DistilBertSelfAttention"}),
        ("q_lin", "k_lin", "v_lin", "out_lin"),
    ),
    SeparateProjections(
        "ALBERT",
        frozenset({"AlbertAttention"}),
        ("query", "key", "value", "dense"),
        adapter=AlbertAttention,
    ),
    SeparateProjections("ViT", _VIT, _NAMED),
    SeparateProjections("Llama", _LLAMA, _NAMED, adapter=RotaryAttention),
)
