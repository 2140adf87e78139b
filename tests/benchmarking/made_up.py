"""Rows that no machine has measured."""

SIZES = {"dim": "512", "heads": "8", "directions": "32", "dtype": "bfloat16"}


def made_up(mechanism, n, *, weights="", causal=False, kind="fwd+bwd", tokens=65536, **cells):
    """A row with the given cells; times in milliseconds."""
    row = {"mechanism": mechanism, "weights": weights, "causal": str(causal), "n": str(n)}
    row |= {"batch": str(max(tokens // n, 1)), **SIZES, "pass": kind, "commit": "abc"}
    blank = dict.fromkeys(["gpu_ms", "wall_ms", "peak_mib"], "")
    return row | blank | {name: str(value) for name, value in cells.items()}


def by_length(mechanism, times, **options):
    return [made_up(mechanism, n, gpu_ms=ms, wall_ms=ms, **options) for n, ms in times.items()]
