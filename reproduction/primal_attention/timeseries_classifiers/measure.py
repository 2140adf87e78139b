"""Measure classifiers of time series on the test cases of ten multivariate sets.

    python reproduction/primal_attention/timeseries_classifiers/measure.py default multirocket_hydra

A classifier is a preset of ``PrimalFormerClassifier``, with changed parameters if the name is
followed by them (``default:num_networks=2``), or one of aeon with its defaults. All are fitted on
the training cases alone, with a seed. A preset with a network has two rows more, of the same fit:
its machine alone and its network alone. Those of aeon take series of one length without gaps: gaps
are interpolated and the ends padded with zeros for them, and their code is compiled before the
clock starts. ``seconds`` of a fit are those of the clock, ``cpu_seconds`` those of the processor.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.tasks import Series, SeriesEncoding, load_uea
from primal_attention.timeseries import PrimalFormerClassifier
from primal_attention.training.devices import device_name
from primal_attention.training.results import add_rows, current_commit, read_rows

FILE = Path(__file__).with_name("classifiers.csv")
SETS = (
    *("JapaneseVowels", "SpokenArabicDigits", "UWaveGestureLibrary", "Handwriting"),
    *("SelfRegulationSCP1", "SelfRegulationSCP2", "ArticularyWordRecognition", "NATOPS"),
    *("LSST", "CharacterTrajectories"),
)
AEON = {"minirocket": "MiniRocketClassifier", "multirocket_hydra": "MultiRocketHydraClassifier"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("classifiers", nargs="+")
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--seeds", nargs="*", type=int, default=range(5))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of the sets, as for primal data uea")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fit after that")
    arguments = parser.parse_args()
    deadline = time.time() + 60 * arguments.minutes
    commit = current_commit()
    for seed in arguments.seeds:
        for name in arguments.sets:
            for text in arguments.classifiers:
                classifier, _, settings = text.partition(":")
                key = (name, classifier, str(seed), settings.replace(",", " "))
                if time.time() < deadline and key not in done():
                    for row in measured(*key, arguments.threads, arguments.data):
                        print(*row.values(), flush=True)
                        add_rows(FILE, [{**row, "commit": commit}])


def done() -> set[tuple[str, ...]]:
    names = ("dataset", "model", "seed", "settings")
    return {tuple(row[name] for name in names) for row in read_rows(FILE)}


def measured(
    name: str, classifier: str, seed: str, settings: str, threads: int, folder: Path | None
) -> Iterator[dict[str, str]]:
    """Fit and test one classifier on one set, and then its parts."""
    train, test = load_uea(name, folder)
    X, X_test = train.series, test.series
    if classifier in AEON:
        encoding = SeriesEncoding.fit(X)
        X, X_test = (of_one_length(each, encoding) for each in (X, X_test))
    torch.set_num_threads(threads)
    model = build(classifier, int(seed), settings, threads)
    if classifier in AEON:
        noise = np.random.default_rng(0).normal(size=(12, *X.shape[1:]))
        build(classifier, 0, settings, threads).fit(noise, np.arange(12) % 2)
    began, began_cpu = time.perf_counter(), time.process_time()
    model.fit(X, train.labels)
    fitted, fitted_cpu = time.perf_counter(), time.process_time()
    hits = model.predict(X_test) == test.labels
    predicted = time.perf_counter()
    row = {
        "dataset": name,
        "model": classifier,
        "protocol": "clean",
        "seed": seed,
        "metric": "accuracy",
        "value": f"{100 * np.mean(hits):.4f}",
        "valid": "",
        "selection": "training cases alone",
        "epoch": "",
        "steps": "",
        "seconds": f"{fitted - began:.1f}",
        "cpu_seconds": f"{fitted_cpu - began_cpu:.1f}",
        "predict_seconds": f"{predicted - fitted:.1f}",
        "device": f"{device_name(torch.device('cpu'))}, {threads} threads",
        "torch": torch.__version__,
        "settings": settings,
    }
    yield row
    if getattr(model, "network_", None) is not None and model.machine_ is not None:
        for part, blend in (("machine", (1.0, 0.0)), ("network", (0.0, 1.0))):
            model.blend_ = blend
            value = f"{100 * model.score(X_test, test.labels):.4f}"
            yield {**row, "model": f"{classifier}_{part}", "value": value}


def build(classifier: str, seed: int, settings: str, threads: int) -> Any:
    """Build a classifier that is to be fitted, by its name."""
    if classifier in AEON:
        from aeon.classification import convolution_based

        return getattr(convolution_based, AEON[classifier])(n_jobs=threads, random_state=seed)
    pairs = (each.split("=") for each in settings.split())
    changes = {key: literal(value) for key, value in pairs}
    return PrimalFormerClassifier(
        preset=classifier, random_state=seed, n_jobs=threads, device="cpu", **changes
    )


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def of_one_length(series: Series, encoding: SeriesEncoding) -> NDArray[np.float64]:
    """Fill gaps and pad the ends of series [C, n] with zeros; the scale stays."""
    inputs = encoding.encode(series)
    x = np.moveaxis(inputs["x"].numpy().astype(np.float64), 1, 2)
    values = x * encoding.std[:, None] + encoding.mean[:, None]
    return np.where(inputs["token_mask"].numpy()[:, None], values, 0.0)


if __name__ == "__main__":
    main()
