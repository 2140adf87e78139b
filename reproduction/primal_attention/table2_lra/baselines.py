"""Count symbols on retrieval-imdb: two reviews are alike by the symbols that they share.

    python reproduction/primal_attention/table2_lra/baselines.py --data data

Symbols are bytes, three bytes in a row, or words; counts are weighted by how rare a symbol is among
the reviews of the training pairs. Pairs are told apart by the cosine of their counts, with the
threshold that is best on the validation pairs. Nothing else is learned.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

from primal_attention.atomic_files import write_rows
from primal_attention.tasks.lra import load_lra
from primal_attention.training.results import current_commit

HERE = Path(__file__).parent
SYMBOLS: dict[str, dict[str, Any]] = {
    "bytes": {"analyzer": "char", "ngram_range": (1, 1), "lowercase": False},
    "three bytes": {"analyzer": "char", "ngram_range": (3, 3), "lowercase": False},
    "words": {"analyzer": "word"},
}
Floats = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of the data, as for primal data lra")
    parser.add_argument("--out", type=Path, default=HERE / "baselines.csv")
    arguments = parser.parse_args()
    prepared = load_lra("retrieval-imdb", arguments.data)
    assert prepared.pairs is not None
    texts = [bytes(row[row > 0] - 1).decode("latin-1") for row in prepared.tokens]
    bounds = np.cumsum([0, *prepared.sizes])
    parts = [slice(*ends) for ends in pairwise(bounds)]
    rows = []
    for name, options in track(SYMBOLS.items(), "counting"):
        alike = cosines(texts, prepared.pairs, parts[0], options)
        same = prepared.targets == 1
        threshold = best_threshold(alike[parts[1]], same[parts[1]])
        valid, test = (100 * np.mean((alike[p] > threshold) == same[p]) for p in parts[1:])
        rows.append(
            {
                "dataset": "retrieval-imdb",
                "symbols": name,
                "metric": "accuracy",
                "value": f"{test:.2f}",
                "valid": f"{valid:.2f}",
                "threshold": f"{threshold:.4f}",
                "commit": current_commit(),
            }
        )
        print("  ".join(f"{cell:>14}" for cell in rows[-1].values()), flush=True)
    write_rows(arguments.out, rows)


def cosines(
    texts: list[str], pairs: NDArray[np.int32], train: slice, options: dict[str, Any]
) -> Floats:
    """Compute the cosine of the weighted counts of both reviews of each pair."""
    counts = HashingVectorizer(alternate_sign=False, norm=None, **options).transform(texts)
    counts = TfidfTransformer().fit(counts[np.unique(pairs[train])]).transform(counts)
    return np.asarray(counts[pairs[:, 0]].multiply(counts[pairs[:, 1]]).sum(1)).ravel()


def best_threshold(alike: Floats, same: NDArray[np.bool_]) -> float:
    """Above which pairs are called the same, so that most are called right."""
    order = np.argsort(alike)
    right = np.cumsum(np.where(same[order], -1, 1))  # called different up to here
    return float(alike[order[int(right.argmax())]])


if __name__ == "__main__":
    main()
