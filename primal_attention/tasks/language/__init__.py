"""Language: texts of words, their windows and prepared files."""

from primal_attention.tasks.language.corpus import (
    EOS,
    LANGUAGE_SETS,
    UNK,
    find_language,
    load_language,
    part_of_film,
    prepare_language,
    read_corpus,
    read_reviews,
)
from primal_attention.tasks.language.task import PERPLEXITY, language_task, text_windows

__all__ = [
    "EOS",
    "LANGUAGE_SETS",
    "PERPLEXITY",
    "UNK",
    "find_language",
    "language_task",
    "load_language",
    "part_of_film",
    "prepare_language",
    "read_corpus",
    "read_reviews",
    "text_windows",
]
