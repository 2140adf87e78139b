"""Language: texts of words, their windows and prepared files."""

from primal_attention.tasks.language.corpus import EOS, UNK, Corpus, read_corpus
from primal_attention.tasks.language.sources import (
    LANGUAGE_SETS,
    find_language,
    load_language,
    prepare_language,
)
from primal_attention.tasks.language.task import PERPLEXITY, language_task
from primal_attention.tasks.language.windows import text_windows

__all__ = [
    "EOS",
    "LANGUAGE_SETS",
    "PERPLEXITY",
    "UNK",
    "Corpus",
    "find_language",
    "language_task",
    "load_language",
    "prepare_language",
    "read_corpus",
    "text_windows",
]
