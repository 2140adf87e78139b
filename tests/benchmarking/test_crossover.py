"""The length at which one time falls below another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.benchmarking.results import crossover, crossover_rows

from .made_up import by_length, made_up


@given(st.floats(200, 30_000))
def test_powers_of_the_length_cross_where_they_are_equal(length):
    ours = dict.fromkeys((128, 512, 2048, 8192, 32768), 3.0)
    theirs = {n: 3.0 * n / length for n in ours}
    assert crossover(ours, theirs).length == pytest.approx(length, rel=1e-9)


@pytest.mark.parametrize(
    ("ours", "length", "note"),
    [
        ({64: 1, 128: 1, 256: 1}, 64, "the shortest"),
        ({64: 9, 128: 9, 256: 9}, None, "slower at 256"),
        ({64: 1, 128: 9, 256: 2}, pytest.approx(128 * 2**0.6131, rel=1e-3), "between 128 and 256"),
        ({64: 1, 512: 1}, None, "fewer than two"),
    ],
)
def test_corners(ours, length, note):
    found = crossover(ours, {64: 2.0, 128: 3.0, 256: 4.0})
    assert found.length == length
    assert note in found.note


def test_rows_compare_like_with_like():
    rows = [
        *by_length("softmax", {256: 2, 1024: 8}),
        *by_length("softmax", {256: 1, 1024: 1}, causal=True),
        *by_length("softmax", {256: 1, 1024: 1}, kind="fwd"),
        *by_length("primal", {256: 4, 1024: 4}, weights="static"),
        made_up("primal", 1048576, weights="static", gpu_ms=99),
    ]
    (row,) = [row for row in crossover_rows(rows) if row["n"]]
    assert (row["mechanism"], row["weights"], row["n"]) == ("crossover", "static", "512")
    assert row["commit"] == "abc"


def test_the_better_of_eager_and_compiled_counts():
    softmax = by_length("softmax", {256: 4, 1024: 16})
    ours = by_length("primal", {256: 4, 1024: 4}, weights="dual")
    compiled = [row | {"compiled_gpu_ms": str(float(row["gpu_ms"]) / 2)} for row in softmax]
    (eager,), (better,) = (list(crossover_rows([*rows, *ours])) for rows in (softmax, compiled))
    assert int(eager["n"]) == 256 and int(better["n"]) == 512
