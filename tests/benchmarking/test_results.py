"""Plans become rows, rows become a file that is whole at every moment."""

import csv
import re

import pytest
import torch

from primal_attention.benchmarking import plans
from primal_attention.benchmarking.clocks import Copy
from primal_attention.benchmarking.measurement import Measurement
from primal_attention.benchmarking.plans import LEFT_OUT, MILLION, PRESETS, plan_of, run_plan
from primal_attention.benchmarking.results import (
    COLUMNS,
    Results,
    copy_row,
    read_rows,
    results_path,
    row_of,
    select,
)

from .made_up import made_up

CPU = torch.device("cpu")
PROMISED = {
    *("mechanism", "weights", "causal", "n", "batch", "dim", "heads", "directions", "dtype"),
    *("pass", "gpu_ms", "wall_ms", "peak_mib", "commit"),
}
COPY = Copy(moved=4000, gpu_ms=2.0, wall_ms=3.0)


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setattr(plans, "measure_copy", lambda device: Copy(4000, None, 2.0))


def tiny(*mechanisms, **sizes):
    given = {"lengths": [3, 7], "total": [21], "dim": [6], "heads": [2], "directions": [3]}
    return plan_of("small", mechanisms, **{**given, **sizes})


def test_a_run_fills_a_file_with_the_promised_columns(tmp_path):
    path, seen = tmp_path / "new" / "x.csv", []
    run_plan(
        tiny("projections", "softmax", "primal-sampled"),
        Results(path),
        commit="abc",
        device=CPU,
        watch=seen.append,
    )
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert PROMISED <= set(rows[0]) == set(COLUMNS)
    assert {row["commit"] for row in rows} == {"abc"}
    (row,) = select(rows, mechanism="primal", weights="sampled", n=7, kind="fwd+bwd")
    assert (row["batch"], row["dim"], row["causal"], row["note"]) == ("3", "6", "False", "")
    assert float(row["wall_ms"]) > 0 and row["gpu_ms"] == ""
    assert float(row["roofline_ms"]) > 0
    assert len(select(rows, mechanism="crossover")) == 2  # for each pass
    assert len(seen) == len(rows)


def test_a_run_that_is_killed_leaves_what_it_has(tmp_path):
    path = tmp_path / "x.csv"

    def stop(row):
        if row["mechanism"] == "softmax":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(tiny("projections", "softmax"), Results(path), commit="a", device=CPU, watch=stop)
    found = [row["mechanism"] for row in read_rows(path)]
    assert found == ["copy", "projections", "projections", "softmax"]
    assert list(tmp_path.iterdir()) == [path]


def test_after_its_time_nothing_is_begun(tmp_path):
    results = Results()
    run_plan(tiny("softmax"), results, commit="a", device=CPU, seconds=0)
    rows = select(results.rows, mechanism="softmax")
    assert rows and all(row["note"] == LEFT_OUT and not row["wall_ms"] for row in rows)


def test_rows_of_earlier_runs_stay_unless_measured_again(tmp_path):
    path = tmp_path / "x.csv"
    before = Results(path)
    before.add(made_up("softmax", 64, gpu_ms=5))
    before.add(made_up("flow", 64, gpu_ms=7))
    again = Results(path)
    again.add(made_up("flow", 64, gpu_ms=6))
    assert [(row["mechanism"], row["gpu_ms"]) for row in read_rows(path)] == [
        ("softmax", "5"),
        ("flow", "6"),
    ]
    assert len(again.rows) == 1


def test_the_compiled_form_is_added_to_its_row():
    job = next(iter(tiny("softmax").jobs()))
    results = Results()
    results.add(row_of(job, Measurement(1.0, 2.0, 3.0, 4000), COPY, "a"))
    results.add(row_of(job._replace(compiled=True), Measurement(0.5, note="odd"), COPY, "a"))
    (row,) = results.rows
    assert (row["gpu_ms"], row["wall_ms"], row["peak_mib"]) == ("1", "2", "3.0")
    assert (row["compiled_gpu_ms"], row["note"]) == ("0.5", "compiled: odd")


def test_the_roofline_is_the_time_of_a_copy_of_as_many_bytes():
    job = next(iter(tiny("softmax").jobs()))
    row = row_of(job, Measurement(4.0, 5.0, None, moved=2000), COPY, "a")
    assert (row["roofline_ms"], row["copy_share"]) == ("1", "0.2500")
    assert copy_row(COPY, "a")["copy_share"] == "1.0000"


def test_the_file_is_named_by_card_version_and_date(tmp_path):
    name = results_path(tmp_path, CPU).name
    assert re.fullmatch(r"[\w]+-cpu_torch\d+\.\d+\.\d+_\d{4}-\d\d-\d\d\.csv", name)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("mechanism,gpu_ms\nsoftmax,3\n")
    with pytest.raises(ValueError, match="lacks the columns batch, causal"):
        read_rows(path)


def test_the_headline_has_what_the_targets_need():
    jobs = list(PRESETS["headline"].jobs())
    seen = {(job.name, job.sizes.n, job.kind, job.compiled) for job in jobs}
    for n in (1024, 4096, 16384, 65536):
        for name in ("projections", "primal-static", "primal-dual-causal", "released-sampled"):
            assert (name, n, "fwd+bwd", False) in seen
        assert ("softmax", n, "fwd+bwd", True) in seen
    (million,) = [job for job in jobs if job.sizes.n == MILLION]
    assert million.sizes.batch == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_measures_twice(preset):
    jobs = list(PRESETS[preset].jobs())
    assert len(jobs) == len(set(jobs)) > 0


def test_all_combinations_of_sizes_are_measured():
    plan = tiny("softmax-causal", dim=[6, 8], heads=[1, 2], dtype=["float32", "float64"])
    assert len({job.sizes for job in plan.jobs()}) == 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("preset", "sizes", "message"),
    [
        ("huge", {}, "no preset 'huge'; one of headline"),
        ("small", {"heads": [0]}, "heads must be at least 1, got 0"),
        ("small", {"dtype": ["int8"]}, "dtype must be one of bfloat16.*got 'int8'"),
    ],
)
def test_mistakes_are_named(preset, sizes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(preset, **sizes)
