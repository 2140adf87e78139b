"""Measure what `suggest_directions` says of a sentence encoder beside a grid of directions.

    python reproduction/patching/minilm/directions.py --text FOLDER

suggestion.csv has what it says of each layer of all-MiniLM-L6-v2, for several shares of the energy.
directions.csv has what comes of the last layer with s = 1, 2, 4, ..., 32 directions, and with those
that were suggested for 90 %: after the closed form on calibration data, and after a short training.
Both as in examples/distill_minilm.py, on the same split of the text: the suggestion is from the
sentences to learn from, what is measured from those held out.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from primal_attention import patch
from primal_attention.analysis import spectrum
from primal_attention.analysis.suggestion import suggestion_from
from primal_attention.atomic_files import write_rows
from primal_attention.training.results import current_commit

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from distill_minilm import NUM_HELD_OUT, load_minilm, split_texts, to_batches, transfer

HERE = Path(__file__).parent
ENERGIES, DIRECTIONS, SUGGESTED_FOR = (0.8, 0.9, 0.95, 0.99), (1, 2, 4, 8, 16, 32), 0.9
LOOKED_AT = 8  # batches, for the spectra
OPTIONS = {"weights": "dual", "feature_map": "relu"}
Row = dict[str, object]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    tokenizer, model = load_minilm()
    learnt, held_out = split_texts(arguments.text, arguments.seed)
    batches = to_batches(tokenizer, learnt, arguments)
    compared = to_batches(tokenizer, held_out[:NUM_HELD_OUT], arguments)
    said = list(suggestions(model, batches[:LOOKED_AT], arguments))
    write_rows(arguments.out / "suggestion.csv", said)
    chosen = said[-len(ENERGIES) + ENERGIES.index(SUGGESTED_FOR)]["num_directions"]
    rows: list[Row] = []
    for number in sorted({*arguments.directions, chosen}):
        for row in recovered(model, number, batches, compared, arguments):
            rows.append(row)
            print(*row.values(), flush=True)
        write_rows(arguments.out / "directions.csv", rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a file, or a folder of .txt files")
    parser.add_argument("--directions", type=int, nargs="+", default=DIRECTIONS)
    parser.add_argument("--steps", type=int, default=60, help="of training, after the closed form")
    parser.add_argument("--calibration", type=int, default=64, help="batches of the closed form")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-tokens", type=int, default=64, help="longer sentences are cut")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the files")
    return parser.parse_args()


def suggestions(model: Any, batches: list[Any], arguments: argparse.Namespace) -> Iterator[Row]:
    """One row a layer and share of the energy."""
    measured = spectrum(model, batches)
    by_energy = {energy: suggestion_from(measured, energy).layers for energy in ENERGIES}
    for number, layer in enumerate(measured.layers):
        for energy, layers in by_energy.items():
            said = layers[number]
            yield {
                "layer": layer.name,
                "energy": energy,
                "num_directions": said.num_directions,
                "limit": said.limit,
                "patch": "yes" if said.patch else "no",
                "explained_by_limit": f"{said.explained:.4f}",
                "tokens": f"{said.num_tokens:.1f}",
                **circumstances(arguments),
            }


def recovered(
    model: Any,
    number: int,
    batches: list[Any],
    held_out: list[Any],
    arguments: argparse.Namespace,
) -> Iterator[Row]:
    """One row a stage: how near the embeddings are to those of the model before."""
    torch.manual_seed(arguments.seed)
    student = patch(deepcopy(model), "primal", layers=-1, num_directions=number, **OPTIONS)
    began = time.perf_counter()
    found, reports = transfer(student, model, batches, held_out, arguments)
    seconds = time.perf_counter() - began
    for stage, embeddings in found.items():
        (errors,) = reports[stage == "transferred"].layers.values()
        yield {
            "num_directions": number,
            "stage": stage,
            "cosine": f"{embeddings.cosine:.4f}",
            "rank_correlation": f"{embeddings.rank_correlation:.4f}",
            "layer_error": f"{getattr(errors, stage):.4f}",
            "steps": reports[-1].steps if stage == "transferred" else 0,
            "seconds": f"{seconds:.0f}",
            **circumstances(arguments),
        }


def circumstances(arguments: argparse.Namespace) -> Row:
    return {
        "text": "docstrings" if arguments.text is None else arguments.text.name,
        "seed": arguments.seed,
        "device": "cpu, 1 thread",
        "torch": torch.__version__,
        "commit": current_commit(),
    }


if __name__ == "__main__":
    main()
