"""Tiny models of every family, with random weights, and one way to run them all."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

B, N, D, H = 2, 7, 24, 6
VOCABULARY = 31
MECHANISMS = ("primal", "softmax_bn", "linear", "flow")

SIZES = {
    "hidden_size": D,
    "num_attention_heads": H,
    "num_hidden_layers": 2,
    "intermediate_size": 17,
    "initializer_range": 0.3,
}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
IDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


class Family(NamedTuple):
    """How to build a model, and its outputs [B, N, ...] from tokens and a mask of the real ones."""

    build: Callable[[], nn.Module]
    tokens: Callable[[], Tensor]
    run: Callable[[Any, Tensor, Tensor], Tensor]
    causal: bool = False
    pads: bool = True  # whether it takes a padding mask at all
    left: bool = True  # whether padding may stand first
    layers: str = "all"

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return self.build().eval()


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (B, N))


def vectors() -> Tensor:
    return torch.randn(B, N, D)


def real_tokens(*, left: bool = False) -> Tensor:
    """A mask of which the second sequence has three padded tokens."""
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, slice(0, 3) if left else slice(N - 3, N)] = False
    return mask


def other(tokens: Tensor, mask: Tensor) -> Tensor:
    """The same real tokens with something else at the padding."""
    wide = mask.view(*mask.shape, *[1] * (tokens.ndim - 2))
    return torch.where(wide, tokens, 5 if tokens.dtype == torch.int64 else 1e3)


def assert_close(actual, expected, tolerance=1e-5):
    """Near in proportion to the largest of the expected numbers."""
    scale = expected.abs().max().clamp(min=1.0)
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= tolerance * scale


def implementations(model: Any) -> Iterator[str]:
    """The ways in which the host can compute its own attention, each set in turn."""
    for name in ("eager", "sdpa"):
        if name == "eager" or getattr(model, "_supports_sdpa", False):
            if hasattr(model, "set_attn_implementation"):
                model.set_attn_implementation(name)
            yield name


def bert(**more: Any) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**TEXT | more))


def bert_decoder() -> Any:
    from transformers import BertConfig, BertLMHeadModel

    return BertLMHeadModel(BertConfig(**TEXT, **IDS, is_decoder=True))


def roberta() -> Any:
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig(**TEXT))


def xlm_roberta_xl() -> Any:
    from transformers import XLMRobertaXLConfig, XLMRobertaXLModel

    return XLMRobertaXLModel(XLMRobertaXLConfig(**TEXT))


def electra() -> Any:
    from transformers import ElectraConfig, ElectraModel

    return ElectraModel(ElectraConfig(**TEXT, embedding_size=8))


def albert() -> Any:
    from transformers import AlbertConfig, AlbertModel

    return AlbertModel(AlbertConfig(**TEXT, embedding_size=8))


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    sizes = {"dim": D, "n_heads": H, "n_layers": 2, "hidden_dim": 17, "initializer_range": 0.3}
    return DistilBertModel(
        DistilBertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=40)
    )


def gpt2(**more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": D, "n_head": H, "n_layer": 2, "n_positions": 40, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes | more, **IDS, vocab_size=VOCABULARY))


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT | more, **IDS, num_key_value_heads=2))


def qwen3(**more: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**TEXT, **IDS, **{"num_key_value_heads": 2, "head_dim": D // H} | more)
    return Qwen3ForCausalLM(config)


def granite() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(**TEXT, **IDS, num_key_value_heads=3, attention_multiplier=0.3)
    return GraniteForCausalLM(config)


def eurobert() -> Any:
    from transformers import EuroBertConfig, EuroBertModel

    return EuroBertModel(EuroBertConfig(**TEXT, **IDS, num_key_value_heads=3))


def vit(kind: str = "ViT") -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, image_size=12, patch_size=4)
    return getattr(transformers, f"{kind}Model")(config)


def decision_transformer() -> Any:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=5,
        act_dim=3,
        hidden_size=D,
        n_head=H,
        n_layer=2,
        max_ep_len=20,
        initializer_range=0.3,
        **IDS,
    )
    return DecisionTransformerModel(config)


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 17, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class TimeFirst(nn.Module):
    """Plain multi-head attentions in a row, tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.MultiheadAttention(D, H) for _ in range(2))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for attention in self.attentions:
            x = x + attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return x.transpose(0, 1)


class Decoder(nn.Module):
    """A decoder over its own input as memory, which is padded likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(D, H, 17, batch_first=True), 2
        )
        self.memory = nn.Parameter(torch.randn(1, 5, D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        memory = self.memory.expand(x.shape[0], -1, -1)
        return self.decoder(x, memory, tgt_mask=future, tgt_key_padding_mask=~mask)


def run_text(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=mask.long())[0]


def run_ordered_text(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """With the positions that generation gives to tokens padded on the left."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions)[0]


def run_images(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    return model(pixel_values=tokens)[0]


def run_decisions(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    def of(size: int) -> Tensor:
        return tokens[..., :size]

    return model(
        states=of(5),
        actions=of(3),
        rewards=of(1),
        returns_to_go=of(1),
        timesteps=(mask.cumsum(1) - 1).clamp(min=0),
        attention_mask=mask.long(),
    ).action_preds


FAMILIES = {
    "bert": Family(bert, ids, run_text),
    "bert_decoder": Family(bert_decoder, ids, run_text, causal=True),
    "roberta": Family(roberta, ids, run_text),
    "xlm_roberta_xl": Family(xlm_roberta_xl, ids, run_text),
    "distilbert": Family(distilbert, ids, run_text),
    "electra": Family(electra, ids, run_text),
    "albert": Family(albert, ids, run_text),
    "vit": Family(vit, lambda: torch.randn(B, 3, 12, 12), run_images, pads=False),
    "deit": Family(lambda: vit("DeiT"), lambda: torch.randn(B, 3, 12, 12), run_images, pads=False),
    "gpt2": Family(gpt2, ids, run_ordered_text, causal=True),
    "decision_transformer": Family(decision_transformer, vectors, run_decisions, causal=True),
    "llama": Family(llama, ids, run_ordered_text, causal=True),
    "qwen3": Family(qwen3, ids, run_ordered_text, causal=True),
    "granite": Family(granite, ids, run_ordered_text, causal=True),
    "eurobert": Family(eurobert, ids, run_text),
    "torch_encoder": Family(
        torch_encoder, vectors, lambda model, x, mask: model(x, src_key_padding_mask=~mask)
    ),
    "torch_attention": Family(TimeFirst, vectors, lambda model, x, mask: model(x, ~mask)),
    "torch_decoder": Family(
        Decoder,
        vectors,
        lambda model, x, mask: model(x, mask),
        causal=True,
        left=False,  # the host itself answers NaN
        layers="*.self_attn",
    ),
}
DECODERS = ("bert_decoder", "gpt2", "llama", "qwen3", "granite")
