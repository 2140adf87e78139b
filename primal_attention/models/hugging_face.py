"""PrimalFormer as models of Hugging Face transformers.

Import them from ``primal_attention.models``, which loads transformers when one is first asked for.

Letters: B batch, N tokens, D model dim, V symbols, K classes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_outputs as outputs
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.validation import check_choice
from primal_attention.models.encoder import EncoderBlock
from primal_attention.models.language import sinusoids
from primal_attention.models.stacks import MODELS, build_attentions
from primal_attention.objectives import ksvd_loss
from primal_attention.patching.hosts.transformers_attention import TransformersAttention

POSITIONS = ("sinusoidal", "learned", "none")


class PrimalFormerConfig(transformers.PreTrainedConfig):
    """The sizes and choices of a PrimalFormer.

    Args:
        vocab_size: Number V of symbols; not used for pictures.
        hidden_size: Model dimension D.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of heads.
        intermediate_size: Width of the feed-forward layers; 4 D by default.
        model: One of ``primal_attention.models.MODELS``; by default ``primalformer``, or
            ``primalformer_time`` where ``is_decoder``.
        attention_options: Options of the layers of that mechanism, ``{"num_directions": 16}``.
        ksvd_eta: Weight of the KSVD objective in the loss while the model trains.
        ksvd_objective: Its name, see ``ksvd_loss``.
        position_type: ``sinusoidal`` (any length), ``learned``, or ``none`` (for layers with
            rotary positions or a learned time).
        max_position_embeddings: The longest sequence, where positions are learned or a mechanism
            has a ``max_tokens``.
        hidden_dropout_prob: Probability of dropout of the embedded tokens and in the blocks.
        hidden_act: ``gelu`` or ``relu``.
        is_decoder: Each token sees itself and those before it.
        use_cache: Return the decode state, in evaluation mode.
        image_size: Pixels of a side, for pictures in place of text.
        patch_size: Pixels of a side of a patch.
        num_channels: Channels of a picture.
        **others: See ``transformers.PreTrainedConfig``.
    """

    model_type = "primalformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(  # noqa: PLR0913 - each is a line of the docstring above
        self,
        vocab_size: int = 30522,
        hidden_size: int = 256,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 4,
        intermediate_size: int | None = None,
        *,
        model: str | None = None,
        attention_options: dict[str, Any] | None = None,
        ksvd_eta: float = 0.0,
        ksvd_objective: str = "released",
        position_type: str = "sinusoidal",
        max_position_embeddings: int = 2048,
        hidden_dropout_prob: float = 0.1,
        hidden_act: str = "gelu",
        is_decoder: bool = False,
        use_cache: bool = True,
        image_size: int | None = None,
        patch_size: int = 16,
        num_channels: int = 3,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **others: Any,
    ):
        if model is not None:
            check_choice("model", model, MODELS)
        check_choice("position_type", position_type, POSITIONS)
        if image_size is not None and image_size % patch_size:
            raise ValueError(f"image_size must be a multiple of {patch_size=}, got {image_size}")
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.intermediate_size = intermediate_size
        self.model, self.attention_options = model, attention_options
        self.ksvd_eta, self.ksvd_objective = ksvd_eta, ksvd_objective
        self.position_type, self.max_position_embeddings = position_type, max_position_embeddings
        self.hidden_dropout_prob, self.hidden_act = hidden_dropout_prob, hidden_act
        self.is_decoder, self.use_cache = is_decoder, use_cache
        self.image_size, self.patch_size, self.num_channels = image_size, patch_size, num_channels
        self.pad_token_id, self.bos_token_id, self.eos_token_id = (
            pad_token_id,
            bos_token_id,
            eos_token_id,
        )
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**others)

    def attentions(self) -> list[nn.Module]:
        """Build the attention of each layer."""
        model = self.model or ("primalformer_time" if self.is_decoder else "primalformer")
        return build_attentions(
            model,
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            causal=self.is_decoder,
            max_tokens=self.max_position_embeddings,
            **(self.attention_options or {}),
        )


class PrimalFormerEmbeddings(nn.Module):
    """Symbols or patches, and their positions, as vectors."""

    def __init__(self, config: PrimalFormerConfig):
        super().__init__()
        D = config.hidden_size
        if config.image_size is None:
            self.tokens = nn.Embedding(config.vocab_size, D)
        else:
            size = config.patch_size
            self.patches = nn.Conv2d(config.num_channels, D, size, stride=size)
        if config.position_type == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, D)
        self.position_type = config.position_type
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the positions [B or 1, N] to vectors [B, N, D], scaled to the size of a position."""
        D = x.shape[-1]
        x = x * math.sqrt(D)
        if self.position_type == "learned":
            longest = self.positions.num_embeddings
            if x.shape[1] > longest:
                raise ValueError(
                    f"{x.shape[1]} tokens were given, max_position_embeddings={longest}; cut them "
                    f"or take position_type='sinusoidal'"
                )
            x = x + self.positions(positions) * math.sqrt(D)
        elif self.position_type == "sinusoidal":
            x = x + sinusoids(positions, D).to(x.dtype)
        y: Tensor = self.dropout(x)
        return y


class PrimalFormerLayer(GradientCheckpointingLayer, EncoderBlock):  # type: ignore[misc]
    """An encoder block that reads masks and caches of transformers."""

    def __init__(self, config: PrimalFormerConfig, attention: nn.Module, layer_idx: int):
        adapted = TransformersAttention(attention, self)
        adapted.layer_idx = layer_idx
        EncoderBlock.__init__(
            self,
            adapted,
            config.hidden_size,
            config.intermediate_size or 4 * config.hidden_size,
            dropout=config.hidden_dropout_prob,
            activation=config.hidden_act,
        )

    def forward(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None
    ) -> Tensor:
        """Return outputs [B, N, D] of the tokens that follow those of the cache."""
        mixed, _ = self.attention(self._read(x), attention_mask, past_key_values)
        return self._add(x, mixed)


class PrimalFormerPreTrainedModel(transformers.PreTrainedModel):
    """Start the modules of all models, and add the objective to their loss."""

    config_class = PrimalFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean: the Trainer divides by the number of batches
    _no_split_modules = ["PrimalFormerLayer", "PrimalFormerEmbeddings"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start a module as PyTorch or this library starts it; keep what was loaded."""
        own = list(module.parameters(recurse=False))
        loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=self.config.hidden_size**-0.5)
        elif own and hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        for parameter, value in loaded:
            parameter.copy_(value)

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """The loss of transformers for models of this kind; in training, eta times J on top."""
        if labels is None:
            return None
        loss: Tensor = self.loss_function(
            logits=logits,
            labels=labels,
            pooled_logits=logits,
            vocab_size=self.config.vocab_size,
            config=self.config,
        )
        if not (self.training and self.config.ksvd_eta):
            return loss
        objective = ksvd_loss(self, objective=self.config.ksvd_objective)
        return loss + float(self.config.ksvd_eta) * objective


class PrimalFormerModel(PrimalFormerPreTrainedModel):
    """Embeddings, blocks and a last norm."""

    def __init__(self, config: PrimalFormerConfig):
        super().__init__(config)
        self.embeddings = PrimalFormerEmbeddings(config)
        self.layers = nn.ModuleList(
            PrimalFormerLayer(config, attention, i)
            for i, attention in enumerate(config.attentions())
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.gradient_checkpointing = False
        self.main_input_name = "input_ids" if config.image_size is None else "pixel_values"
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of the symbols, or the map of the patches."""
        own = self.embeddings
        return own.tokens if self.config.image_size is None else own.patches

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of the symbols, or the map of the patches."""
        name = "tokens" if self.config.image_size is None else "patches"
        setattr(self.embeddings, name, value)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return the vectors [B, N, D] of symbols, of vectors in their place, or of patches.

        The mask is [B, N], or [B, T] with the tokens of the cache, 1 at real tokens.
        """
        given = [each for each in (input_ids, inputs_embeds, pixel_values) if each is not None]
        if len(given) != 1:
            raise ValueError("pass exactly one of input_ids, inputs_embeds and pixel_values")
        if input_ids is not None:
            inputs_embeds = self.embeddings.tokens(input_ids)
        elif pixel_values is not None:
            inputs_embeds = self.embeddings.patches(pixel_values).flatten(2).mT
        assert inputs_embeds is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if not self.config.is_decoder:
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = transformers.DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, past_key_values)
        x = self.embeddings(inputs_embeds, position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x, attention_mask=attention_mask, past_key_values=past_key_values)
        x = self.norm(x)
        return outputs.BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if output_hidden_states else None,
        )


class PrimalFormerForCausalLM(PrimalFormerPreTrainedModel, transformers.GenerationMixin):
    """Predicts each next symbol; generates with a state of constant size."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PrimalFormerConfig):
        config = copy.deepcopy(config)
        config.is_decoder = True
        super().__init__(config)
        self.model = PrimalFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """Return logits [B, N, V] of the symbols after each; labels are the symbols themselves."""
        found = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            **_read_by_model(others),
        )
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, last])
        return outputs.CausalLMOutputWithPast(
            loss=self._loss(logits, labels),  # type: ignore[arg-type]
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
        )


class _Headed(PrimalFormerPreTrainedModel):
    """A model that reads out the vectors of an encoder."""

    output: type

    def __init__(self, config: PrimalFormerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PrimalFormerModel(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: PrimalFormerConfig) -> None:
        """Add a linear map to the classes."""
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))

    def read(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """Compute the logits of vectors [B, N, D]: by default one row [B, K] of their mean."""
        if token_mask is None:
            mean = x.mean(1)
        else:
            real = token_mask > 0
            mean = zero_padding(x, real).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return logits, and the loss where there are labels."""
        return self._run(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "inputs_embeds": inputs_embeds,
                **_read_by_model(others),
            },
            labels,
        )

    def _run(self, inputs: dict[str, Any], labels: Tensor | None) -> Any:
        found = self.model(**inputs, use_cache=False)
        logits = self.read(found.last_hidden_state, inputs.get("attention_mask"))
        loss = self._loss(logits, labels)
        return self.output(loss=loss, logits=logits, hidden_states=found.hidden_states)


class PrimalFormerForSequenceClassification(_Headed):
    """Classes, or numbers, of whole sequences, from the mean of their tokens."""

    output = outputs.SequenceClassifierOutput


class PrimalFormerForTokenClassification(_Headed):
    """A class of each token."""

    output = outputs.TokenClassifierOutput

    def read(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """Compute logits [B, N, K]."""
        logits: Tensor = self.classifier(self.dropout(x))
        return logits


class PrimalFormerForMaskedLM(_Headed):
    """The symbols behind masked tokens."""

    output = outputs.MaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.tokens.weight"}  # noqa: RUF012

    def add_head(self, config: PrimalFormerConfig) -> None:
        """Add a layer and the table of the symbols."""
        D = config.hidden_size
        self.transform, self.transform_norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, int(config.vocab_size))

    def read(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """Compute logits [B, N, V]."""
        x = self.transform_norm(ACT2FN[self.config.hidden_act](self.transform(x)))
        logits: Tensor = self.lm_head(x)
        return logits


class PrimalFormerForImageClassification(_Headed):
    """Classes of pictures [B, channels, S, S], from the mean of their patches."""

    output = outputs.ImageClassifierOutput
    main_input_name = "pixel_values"

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[override]
        self, pixel_values: Tensor, labels: Tensor | None = None, **others: Any
    ) -> Any:
        """Return logits [B, K], and the loss where there are labels."""
        return self._run({"pixel_values": pixel_values, **_read_by_model(others)}, labels)


def _read_by_model(others: dict[str, Any]) -> dict[str, Any]:
    """The keyword that a head passes on; the model reads no other."""
    name = "output_hidden_states"
    return {name: others[name]} if name in others else {}


def _positions(x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Positions [B or 1, N] among the real tokens, those of the cache included."""
    N = x.shape[1]
    if mask is not None and mask.dim() == 2:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -N:]
    before = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(N, device=x.device) + before)[None]


def register() -> None:
    """Make the Auto classes of transformers know these models."""
    kind = PrimalFormerConfig
    transformers.AutoConfig.register(kind.model_type, kind, exist_ok=True)
    for auto, model in (
        (transformers.AutoModel, PrimalFormerModel),
        (transformers.AutoModelForCausalLM, PrimalFormerForCausalLM),
        (transformers.AutoModelForMaskedLM, PrimalFormerForMaskedLM),
        (transformers.AutoModelForSequenceClassification, PrimalFormerForSequenceClassification),
        (transformers.AutoModelForTokenClassification, PrimalFormerForTokenClassification),
        (transformers.AutoModelForImageClassification, PrimalFormerForImageClassification),
    ):
        auto.register(kind, model, exist_ok=True)


register()
