"""Models from a list of attentions: classifiers, two towers, language models."""

from primal_attention.models.classifier import SequenceClassifier, Tower, TwoTowerClassifier
from primal_attention.models.embedding import Embedding
from primal_attention.models.encoder import Encoder, EncoderBlock
from primal_attention.models.language import LanguageModel
from primal_attention.models.stacks import MODELS, build_attentions

__all__ = [
    "MODELS",
    "Embedding",
    "Encoder",
    "EncoderBlock",
    "LanguageModel",
    "SequenceClassifier",
    "Tower",
    "TwoTowerClassifier",
    "build_attentions",
]
