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
class SeparateProjections(host.Host):
    """A family by the class names of its attentions and the names of their four projections."""

    name: str
    classes: frozenset[str]
    projections: tuple[str, str, str, str]  # q, k, v, out; out from the parent if taken over
    takes_over: tuple[str, ...] = ()
    adapter: type[TransformersAttention] = TransformersAttention

    def owns(self, module: nn.Module) -> bool:
        """Compare the name of its class, in a module of transformers."""
        kind = type(module)
        return kind.__name__ in self.classes and kind.__module__.startswith("transformers.models.")

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Read the four projections; grouped keys stay grouped."""
        config: Any = module.config
        head_dim = int(getattr(module, "attention_head_size", 0) or module.head_dim)  # type: ignore[arg-type]
        q, k, v = (host.Affine.of(module.get_submodule(name)) for name in self.projections[:3])
        holder = ancestors[-1] if self.takes_over else module
        out = host.Affine.of(holder.get_submodule(self.projections[3]))
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
            dropout=getattr(getattr(module, "output_dropout", None), "p", 0.0),
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
            plan = getattr(model, "_tp_plan", None)
            if isinstance(plan, dict):
                path = next(name for name, each in model.named_modules() if each is module)
                names = ["*" if name.isdigit() else name for name in path.split(".")]
                prefix = ".".join([*names, ""])
                kept = {name: style for name, style in plan.items() if not name.startswith(prefix)}
                if len(kept) < len(plan):
                    changes.append(host.Change(model, "_tp_plan", kept))
        return changes


class GPT2(host.Host):
    """GPT-2, and the one inside the Decision Transformer.

    ``c_attn`` holds queries, keys and values, transposed; the residual dropout is the attention's.
    """

    name = "GPT-2"

    def owns(self, module: nn.Module) -> bool:
        """Accept self-attentions; those to an encoder have a projection of another shape."""
        classes = ("GPT2Attention", "DecisionTransformerGPT2Attention")
        return type(module).__name__ in classes and not module.is_cross_attention

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Cut the packed projection in three, and transpose."""
        attention: Any = module
        q, k, v = _transposed(attention.c_attn).split(3)
        return host.Projections(
            q.scaled(host.score_factor(attention.scaling, attention.head_dim)),
            k,
            v,
            _transposed(attention.c_proj),
            num_heads=attention.num_heads,
            causal=True,
            dropout=attention.resid_dropout.p,
            max_tokens=_max_tokens(attention.config),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Use the adapter that the models of transformers share."""
        return TransformersAttention(mechanism, module)


def _transposed(conv1d: Any) -> host.Affine:
    from transformers.pytorch_utils import Conv1D

    host.check_plain(conv1d, Conv1D)
    return host.Affine(conv1d.weight.mT, conv1d.bias)


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
    SeparateProjections(
        "BERT",
        _classes(
            "SelfAttention",
            "Bert BertGeneration Camembert Data2VecText Electra Ernie RoCBert Roberta "
            "RobertaPreLayerNorm XLMRoberta XLMRobertaXL Xmod",
        ),
        ("query", "key", "value", "output.dense"),
        ("output.dense",),
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
    SeparateProjections("ViT", _classes("Attention", "AST DeiT IJepa ViT ViTMAE ViTMSN"), _NAMED),
    SeparateProjections(
        "Llama",
        _classes(
            "Attention",
            "Arcee EuroBert Gemma Granite Helium Llama Mistral Mixtral Qwen2 Qwen3",
        ),
        _NAMED,
        adapter=RotaryAttention,
    ),
    GPT2(),
)
