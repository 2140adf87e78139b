"""`primal generate`: words that a trained language model writes."""

from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console

from primal_attention.cli.arguments import Checkpoint, naming
from primal_attention.models import LanguageModel
from primal_attention.tasks.language import EOS, UNK
from primal_attention.training.model_factory import Trained, load_trained


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="What comes before, as words and blanks.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many words to write.")] = 50,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Below 1 the likely words are more so; 0: always first."),
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among so many; default: among all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
) -> None:
    """Write words after a prompt, one at a time; memory does not grow with their number.

    Lines of the text end in <eos>, which is shown as a new line.
    """
    with naming("CHECKPOINT"):
        trained = load_trained(checkpoint)
        model = _language_model(trained)
    told, shown = (
        Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        for stderr in (True, False)
    )
    ids, unknown = read_prompt(prompt, trained.labels)
    if unknown:
        words = " ".join(unknown)
        told.print(f"not in the vocabulary, read as {UNK}: {words}", soft_wrap=True)
    with naming("CHECKPOINT or --tokens"):
        written = model.generate(
            torch.tensor([ids]),
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator().manual_seed(seed),
        )
    shown.print(text_of(written[0, 1:].tolist(), trained.labels), soft_wrap=True)


def _language_model(trained: Trained) -> LanguageModel:
    if not isinstance(trained.model, LanguageModel):
        raise ValueError(
            f"a model of {trained.recipe.task} writes no words; one of a task language/... does"
        )
    return trained.model


def read_prompt(prompt: str, vocabulary: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the numbers of the words, each line after that of its end, and the unknown words."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    words = [word for line in prompt.split("\n") for word in (EOS, *line.split())]
    ids = [numbers.get(word, numbers[UNK]) for word in words]
    return ids, [word for word in dict.fromkeys(words) if word not in numbers]


def text_of(ids: Sequence[int], vocabulary: Sequence[str]) -> str:
    """Join words by blanks, with a new line for each end of a line."""
    text = " ".join(vocabulary[number] for number in ids)
    return "\n".join(line.strip() for line in text.split(EOS))
