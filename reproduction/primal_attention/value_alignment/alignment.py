"""Measure how far the values of trained softmax heads are the vectors that kernel theory names.

    python reproduction/primal_attention/value_alignment/alignment.py --text FOLDER

Of all-MiniLM-L6-v2 on texts cut to 128 tokens, and of the softmax classifier of Table 1 on the test
cases of JapaneseVowels, trained here with three seeds; beside each the same network with the
weights that it would start from. alignment.csv has one row a model, layer, theory and number of
theoretical vectors; agreement.py says what is compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from agreement import Agreement, value_alignment
from torch import nn

from primal_attention.atomic_files import write_rows
from primal_attention.training import build_model, find_recipe, launch, task_of, train_in
from primal_attention.training.devices import device_name
from primal_attention.training.results import current_commit, settings_of

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEEDS, DIRECTIONS = 3, (4, None)  # None: the head dimension, at most half the keys
TEXTS, MAX_TOKENS, BATCH = 128, 128, 16
KEY = ("dataset", "model", "weights", "seed", "settings")
Row = dict[str, object]


class Subject(NamedTuple):
    """A network, what it is called in the rows, and batches of its arguments."""

    dataset: str
    model: str
    weights: str  # trained or untrained
    seed: int
    settings: str
    network: nn.Module
    batches: list[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a file or a folder of .txt files")
    parser.add_argument("--texts", type=int, default=TEXTS, help="how many of them")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to the recipe")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for alignment.csv")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for subjects in (
        sentences(arguments.text, arguments.texts),
        series(arguments.seeds, arguments.set),
    ):
        for subject in subjects:
            rows += measured(subject)
            print(subject.dataset, subject.model, subject.weights, subject.seed, flush=True)
            write_rows(arguments.out / "alignment.csv", rows)


def series(seeds: int, settings: list[str]) -> Iterator[Subject]:
    """The classifier of Table 1, trained by its recipe, and as it starts."""
    for seed in range(seeds):
        recipe = find_recipe("uea/JapaneseVowels", "softmax", "clean", seed).with_settings(settings)
        task = task_of(recipe)
        whole = [task.test[torch.arange(len(task.test))].inputs]
        key: Row = {"dataset": "JapaneseVowels", "model": "softmax", "seed": seed}
        key["settings"] = settings_of(recipe)
        torch.manual_seed(seed)
        yield Subject(
            **key, weights="untrained", network=build_model(recipe, task.sizes), batches=whole
        )
        yield Subject(**key, weights="trained", network=trained(recipe, task), batches=whole)


def trained(recipe: Any, task: Any) -> nn.Module:
    from primal_attention.training.model_factory import load_trained

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        train_in(place, recipe, task, launch(recipe.run.precision, devices=1))
        return load_trained(place).model


def sentences(path: Path | None, number: int) -> Iterator[Subject]:
    """The sentence encoder, trained, and with weights drawn as a BERT's are."""
    sys.path.append(str(ROOT / "examples"))
    from distill_minilm import docstrings, load_minilm, read_texts

    texts = docstrings() if path is None else read_texts(path)
    step = max(len(texts) // number, 1)
    tokenizer, model = load_minilm()
    cut = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    chosen = sorted(texts[::step][:number], key=len)
    batches = [dict(tokenizer(chosen[i : i + BATCH], **cut)) for i in range(0, len(chosen), BATCH)]
    key: Row = {"dataset": "docstrings" if path is None else path.name, "model": "all-MiniLM-L6-v2"}
    key |= {"seed": 0, "settings": f"texts={len(chosen)} max_tokens={MAX_TOKENS}"}
    yield Subject(**key, weights="trained", network=model, batches=batches)
    torch.manual_seed(0)
    start = type(model)(model.config)
    yield Subject(**key, weights="untrained", network=start, batches=batches)


def measured(subject: Subject) -> Iterator[Row]:
    """One row a number of vectors, layer and theory."""
    key = {name: getattr(subject, name) for name in KEY}
    for directions in DIRECTIONS:
        found = value_alignment(subject.network, subject.batches, directions)
        names = list(dict.fromkeys(name for name, _ in found))
        for (name, theory), numbers in found.items():
            yield {
                **key,
                "layer": names.index(name),
                "theory": theory,
                "directions": "head" if directions is None else directions,
                **{column: f"{numbers[column]:.4f}" for column in Agreement._fields},
                "device": device_name(torch.device("cpu")),
                "torch": torch.__version__,
                "commit": current_commit(),
            }


if __name__ == "__main__":
    main()
