"""Models from a list of attentions: classifiers, two towers, language models.

Models of Hugging Face transformers are loaded, and transformers with them, on first use.
"""

from typing import TYPE_CHECKING, Any

from primal_attention.extras import needing
from primal_attention.models.classifier import SequenceClassifier, Tower, TwoTowerClassifier
from primal_attention.models.embedding import Embedding
from primal_attention.models.encoder import Encoder, EncoderBlock
from primal_attention.models.language import LanguageModel
from primal_attention.models.stacks import MODELS, build_attentions

if TYPE_CHECKING:
    from primal_attention.models.hugging_face import (
        PrimalFormerConfig,
        PrimalFormerForCausalLM,
        PrimalFormerForImageClassification,
        PrimalFormerForMaskedLM,
        PrimalFormerForSequenceClassification,
        PrimalFormerForTokenClassification,
        PrimalFormerModel,
    )

__all__ = [
    "MODELS",
    "Embedding",
    "Encoder",
    "EncoderBlock",
    "LanguageModel",
    "PrimalFormerConfig",
    "PrimalFormerForCausalLM",
    "PrimalFormerForImageClassification",
    "PrimalFormerForMaskedLM",
    "PrimalFormerForSequenceClassification",
    "PrimalFormerForTokenClassification",
    "PrimalFormerModel",
    "SequenceClassifier",
    "Tower",
    "TwoTowerClassifier",
    "build_attentions",
]


def __getattr__(name: str) -> Any:
    if not (name.startswith("PrimalFormer") and name in __all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing(f"{name} needs transformers", "patch"):
        from primal_attention.models import hugging_face
    return getattr(hugging_face, name)
