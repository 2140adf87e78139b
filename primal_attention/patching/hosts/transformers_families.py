"""The families of Hugging Face transformers: where their attentions keep their projections."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from primal_attention.patching.hosts import host
from primal_attention.patching.hosts.transformers_attention import (
    AlbertAttention,
    RotaryAttention,
    TransformersAttention,
)


@dataclass(frozen=True)
class TransformersFamily(host.Host):
    """A family by the class names of its attentions and the names of their projections."""

    name: str
    classes: frozenset[str]
    projections: tuple[
        str, ...
    ]  # q, k, v or one of all three; then out, of the parent if taken over
    takes_over: tuple[str, ...] = ()
    adapter: type[TransformersAttention] = TransformersAttention

    def owns(self, module: nn.Module) -> bool:
        """Compare the name of its class, in a module of transformers."""
        kind = type(module)
        known = kind.__name__ in self.classes and kind.__module__.startswith("transformers.models.")
        return known and not getattr(module, "is_cross_attention", False)

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Read the four projections; grouped keys stay grouped."""
        config: Any = module.config
        head_dim = int(getattr(module, "attention_head_size", 0) or module.head_dim)  # type: ignore[arg-type]
        inner = [_affine(module.get_submodule(name)) for name in self.projections[:-1]]
        q, k, v = inner[0].split(3) if len(inner) == 1 else inner
        holder = ancestors[-1] if self.takes_over else module
        out = _affine(holder.get_submodule(self.projections[-1]))
        dropout = getattr(module, "output_dropout", None) or getattr(module, "resid_dropout", None)
        _refuse(module, q, out)
        factor = host.score_factor(float(module.scaling), head_dim)  # type: ignore[arg-type]
        if factor != 1.0 and hasattr(module, "q_norm"):
            raise ValueError(f"{type(module).__name__} scales its normalised queries by {factor}")
        return host.Projections(
            q.scaled(factor),
            k,
            v,
            out,
            num_heads=q.weight.shape[0] // head_dim,
            causal=bool(module.is_causal) and getattr(config, "is_causal", None) is not False,
            dropout=getattr(dropout, "p", 0.0),
            max_tokens=_max_tokens(config),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Use the adapter of the family."""
        return self.adapter(mechanism, module)

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[host.Change]:
        """Take such attentions out of the tensor-parallel plans of the models above.

        A plan names modules with a wildcard for the number of the layer, so it cannot tell patched
        layers from others. Its attentions are then whole on each device; the rest is split as
        before.
        """
        changes = []
        for model in ancestors:
            plan = getattr(model, "_tp_plan", None) or {}
            path = next(name for name, each in model.named_modules() if each is module)
            own = ".".join("*" if name.isdigit() else name for name in path.split(".")) + "."
            kept = {name: style for name, style in plan.items() if not name.startswith(own)}
            if len(kept) < len(plan):
                changes.append(host.Change(model, "_tp_plan", kept))
        return changes


def _affine(projection: Any) -> host.Affine:
    from transformers.pytorch_utils import Conv1D

    if type(projection) is Conv1D:
        return host.Affine(projection.weight.mT, projection.bias)
    return host.Affine.of(projection)


def _max_tokens(config: Any) -> int | None:
    """The longest input by a config: its table of positions, or the patches of its images."""
    length = getattr(config, "max_position_embeddings", None)
    if length is not None:
        return int(length)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if not isinstance(image, int) or not isinstance(patch, int):
        return None
    return (image // patch) ** 2 + 2  # a class token, and DeiT's distillation token


def _refuse(module: nn.Module, q: host.Affine, out: host.Affine) -> None:
    config: Any = module.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = types is None or types[module.layer_idx] == "sliding_attention"
    if slides and window is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {window} tokens, which no mechanism "
            "honours; set config.sliding_window = None, or patch other layers"
        )
    if q.weight.shape[0] != out.weight.shape[0]:
        raise ValueError(
            f"{type(module).__name__} has heads of {q.weight.shape[0]} channels in all in a model "
            f"of dimension {out.weight.shape[0]}; only equal numbers can be patched"
        )


def _classes(ending: str, names: str) -> frozenset[str]:
    return frozenset(f"{name}{ending}" for name in names.split())


_NAMED = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES: tuple[host.Host, ...] = (
    TransformersFamily(
        "BERT",
        _classes(
            "SelfAttention",
            "Bert BertGeneration Camembert Data2VecText Electra Ernie RoCBert Roberta "
            "RobertaPreLayerNorm XLMRoberta XLMRobertaXL Xmod",
        ),
        ("query", "key", "value", "output.dense"),
        ("output.dense",),
    ),
    TransformersFamily(
        "DistilBERT",
        frozenset({"DistilBertSelfAttention"}),
        ("q_lin", "k_lin", "v_lin", "out_lin"),
    ),
    TransformersFamily(
        "ALBERT",
        frozenset({"AlbertAttention"}),
        ("query", "key", "value", "dense"),
        adapter=AlbertAttention,
    ),
    TransformersFamily("ViT", _classes("Attention", "AST DeiT IJepa ViT ViTMAE ViTMSN"), _NAMED),
    TransformersFamily(
        "Llama",
        _classes(
            "Attention",
            "Arcee EuroBert Gemma Granite Helium Llama Mistral Mixtral Qwen2 Qwen3",
        ),
        _NAMED,
        adapter=RotaryAttention,
    ),
    TransformersFamily(
        "GPT-2",
        frozenset({"GPT2Attention", "DecisionTransformerGPT2Attention"}),
        ("c_attn", "c_proj"),
    ),
)
