"""Fit the presets on series of many sizes: time and memory.

    python reproduction/primal_attention/timeseries_classifiers/sizes.py fast default

Series are noise with a wave of one of three frequencies. Each fit is a process of its own, of which
the peak of the memory is measured.
"""

import argparse
import multiprocessing as mp
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from primal_attention.atomic_files import write_rows
from primal_attention.timeseries import PrimalFormerClassifier
from primal_attention.training.results import current_commit

FILE = Path(__file__).with_name("sizes.csv")
MIDDLE = (200, 200, 6)  # cases, points, channels
SIZES = (
    MIDDLE,
    (30, 200, 6),
    (2000, 200, 6),
    (7000, 200, 6),
    (200, 20, 6),
    (200, 1000, 6),
    (200, 3000, 6),
    (200, 200, 1),
    (200, 200, 100),
    (200, 200, 1000),
    (30, 20, 1),
    (30, 3000, 100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fit after that")
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    deadline, commit, rows = time.time() + 60 * arguments.minutes, current_commit(), []
    for preset in arguments.presets:
        for size in SIZES:
            if time.time() > deadline:
                break
            with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
                row = pool.submit(measured, preset, size, arguments.threads).result()
            rows.append({**row, "commit": commit})
            write_rows(arguments.out, rows)
            print(*row.values(), flush=True)


def measured(preset: str, size: tuple[int, int, int], threads: int) -> dict[str, str]:
    """Fit one preset on series of one size."""
    cases, points, channels = size
    rng = np.random.default_rng(0)
    y = np.arange(cases) % 3
    X = rng.normal(size=(cases, channels, points)).astype(np.float32)
    angles = (y[:, None] + 2) * np.linspace(0, 6, points) + rng.uniform(0, 6, (cases, 1))
    X[:, 0] += np.sin(angles).astype(np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    classifier = PrimalFormerClassifier(preset=preset, random_state=0, n_jobs=threads, device="cpu")
    began, began_cpu = time.perf_counter(), time.process_time()
    classifier.fit(X, y)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    assert np.isfinite(classifier.predict_proba(X[:10])).all()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "preset": preset,
        "cases": str(cases),
        "points": str(points),
        "channels": str(channels),
        "seconds": f"{seconds:.1f}",
        "cpu_seconds": f"{cpu:.1f}",
        "data_and_packages_mib": str(before // 1024),
        "peak_mib": str(peak // 1024),
        "device": f"cpu, {threads} of {os.cpu_count()} threads",
    }


if __name__ == "__main__":
    main()
