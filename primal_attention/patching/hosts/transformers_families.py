"""The families of Hugging Face transformers: where their attentions keep their projections."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from primal_attention.patching.hosts import host
from primal_attention.patching.hosts.transformers_attention import (
    AlbertAttention,
    RotaryAttention,
    TransformersAttention,
)


def is_of_transformers(module: nn.Module, classes: frozenset[str]) -> bool:
    """Return whether a module is of one of the classes, by name, in a module of transformers."""
    kind = type(module)
    return kind.__name__ in classes and kind.__module__.startswith("transformers.models.")


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
    packed_by_head: bool = False  # one projection has query, key and value of head after head
    causal_models: tuple[str, ...] = ()  # whose attentions are causal and do not say so

    def owns(self, module: nn.Module) -> bool:
        """Compare the name of its class, in a module of transformers."""
        known = is_of_transformers(module, self.classes)
        return known and not _is_cross(module)

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Read the four projections; grouped keys stay grouped."""
        config: Any = module.config
        inner = [_affine(module.get_submodule(name)) for name in self.projections[:-1]]
        q, k, v = self._unpacked(inner[0], module) if len(inner) == 1 else inner
        holder = ancestors[-1] if self.takes_over else module
        out = _affine(holder.get_submodule(self.projections[-1]))
        if self.is_local(module):
            raise ValueError(
                f"{type(module).__name__} has a sliding window of {config.sliding_window} tokens, "
                "which no mechanism honours; patch the layers without one (layers='all' takes "
                "these alone), or build the model from a config without windows"
            )
        return host.Projections(
            q if hasattr(module, "q_norm") else q.scaled(_score_factor(module)),
            k,
            v,
            out,
            num_heads=q.weight.shape[0] // _head_dim(module),
            causal=_is_causal(module) or getattr(config, "model_type", "") in self.causal_models,
            dropout=_output_dropout(module),
            max_tokens=_max_tokens(module),
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Use the adapter of the family."""
        layer = self.adapter(mechanism, module)
        if isinstance(layer, RotaryAttention) and hasattr(module, "q_norm"):
            layer.query_factor = _score_factor(module)
        return layer

    def is_local(self, module: nn.Module) -> bool:
        """Return whether the config gives this layer a sliding window."""
        config: Any = module.config
        types = getattr(config, "layer_types", None)
        slides = types is None or types[module.layer_idx] == "sliding_attention"
        return slides and getattr(config, "sliding_window", None) is not None

    def _unpacked(self, packed: host.Affine, module: nn.Module) -> list[host.Affine]:
        """Cut one projection of queries, keys and values into three."""
        head_dim = _head_dim(module)
        rows = torch.arange(packed.weight.shape[0])
        groups: int | None = getattr(module.config, "num_key_value_heads", None)
        if self.packed_by_head:
            chosen = list(rows.view(-1, 3, head_dim).unbind(1))
        elif groups is None:
            chosen = list(rows.chunk(3))
        else:
            keys = groups * head_dim
            chosen = list(rows.tensor_split([-2 * keys, -keys]))
        return [packed.rows(each.flatten()) for each in chosen]

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


def _head_dim(module: Any) -> int:
    """Channels of a head, under the names that hosts have for it."""
    names = ("attention_head_size", "head_size", "head_dim")
    return int(next(getattr(module, name) for name in names if getattr(module, name, 0)))


def _score_factor(module: Any) -> float:
    """The factor of queries, where scores are not divided by sqrt(C)."""
    head_dim = _head_dim(module)
    scaling = getattr(module, "scaling", getattr(module, "scale", head_dim**-0.5))
    return host.score_factor(float(scaling), head_dim)


def _is_cross(module: Any) -> bool:
    """True where keys come from an encoder: by its own word, or in a decoder and not causal."""
    decodes = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    return bool(getattr(module, "is_cross_attention", decodes))


def _is_causal(module: Any) -> bool:
    return bool(module.is_causal) and getattr(module.config, "is_causal", None) is not False


def _output_dropout(module: Any) -> float:
    names = ("output_dropout", "resid_dropout", "out_drop")
    return next((p for name in names if (p := getattr(getattr(module, name, None), "p", 0.0))), 0.0)


def _max_tokens(module: Any) -> int | None:
    """The longest input by a config: its table of positions, or the patches of its images."""
    config = module.config
    side = "target" if getattr(module, "is_decoder", False) else "source"
    for name in ("max_position_embeddings", f"max_{side}_positions"):
        length = getattr(config, name, None)
        if length is not None:
            return int(length)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if not isinstance(image, int) or not isinstance(patch, int):
        return None
    return (image // patch) ** 2 + 2  # a class token, and DeiT's distillation token


@dataclass(frozen=True)
class RefusedFamily(host.Host):
    """A family that is known and cannot be patched, and the reason."""

    name: str
    classes: frozenset[str]
    why: str

    def owns(self, module: nn.Module) -> bool:
        """Compare the name of its class, in a module of transformers."""
        return is_of_transformers(module, self.classes)

    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> host.Projections:
        """Raise the reason."""
        raise ValueError(
            f"{type(module).__name__} {self.why}. A host of your own may leave it out on purpose: "
            "primal_attention.patching.register_host"
        )

    def adapt(self, module: nn.Module, mechanism: nn.Module) -> host.PatchedAttention:
        """Never run: ``read`` raises before."""
        raise NotImplementedError(self.name)


def _classes(ending: str, names: str) -> frozenset[str]:
    return frozenset(f"{name}{ending}" for name in names.split())


_NAMED = ("q_proj", "k_proj", "v_proj", "o_proj")
_SPOKEN = ("q_proj", "k_proj", "v_proj", "out_proj")
_BIAS = (
    "adds a bias of relative positions to its scores, which a mechanism without a matrix of "
    "scores cannot honour; patch a model with positions in its inputs or rotary ones, such as "
)
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
    TransformersFamily(
        "ModernBERT",
        frozenset({"ModernBertAttention"}),
        ("Wqkv", "Wo"),
        adapter=RotaryAttention,
    ),
    TransformersFamily("ViT", _classes("Attention", "AST DeiT IJepa ViT ViTMAE ViTMSN"), _NAMED),
    TransformersFamily(
        "CLIP",
        _classes("Attention", "CLIP Siglip"),
        _SPOKEN,
        causal_models=("clip_text_model",),
    ),
    TransformersFamily(
        "wav2vec2",
        _classes("Attention", "Wav2Vec2 Hubert Data2VecAudio UniSpeech UniSpeechSat"),
        _SPOKEN,
    ),
    TransformersFamily("Whisper", frozenset({"WhisperAttention"}), _SPOKEN),
    TransformersFamily("BART", _classes("Attention", "Bart MBart Marian Pegasus"), _SPOKEN),
    TransformersFamily(
        "Llama",
        _classes(
            "Attention",
            "Arcee EuroBert Gemma Gemma2 Gemma3 Granite Helium Llama Mistral Mixtral Olmo2 Qwen2 "
            "Qwen3",
        ),
        _NAMED,
        adapter=RotaryAttention,
    ),
    TransformersFamily(
        "Phi-3", frozenset({"Phi3Attention"}), ("qkv_proj", "o_proj"), adapter=RotaryAttention
    ),
    TransformersFamily(
        "GPT-NeoX",
        frozenset({"GPTNeoXAttention"}),
        ("query_key_value", "dense"),
        adapter=RotaryAttention,
        packed_by_head=True,
    ),
    TransformersFamily(
        "GPT-2",
        frozenset({"GPT2Attention", "DecisionTransformerGPT2Attention"}),
        ("c_attn", "c_proj"),
    ),
    RefusedFamily("T5", _classes("Attention", "T5 MT5 UMT5 LongT5"), f"{_BIAS}BART"),
    RefusedFamily(
        "DeBERTa",
        frozenset({"DisentangledSelfAttention"}),
        "scores each pair of tokens by their distance too, which a mechanism without a matrix of "
        "scores cannot honour; patch a model with positions in its inputs or rotary ones, such as "
        "RoBERTa or ModernBERT",
    ),
    RefusedFamily("WavLM", frozenset({"WavLMAttention"}), f"{_BIAS}wav2vec2 or HuBERT"),
    RefusedFamily(
        "Swin",
        frozenset({"SwinAttention", "SwinSelfAttention", "Swinv2SelfAttention"}),
        "attends within windows of a few tokens, where linear time gains nothing, and "
        f"{_BIAS}ViT or DeiT",
    ),
)
