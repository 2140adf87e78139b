"""The verdicts on rows that are made up."""

import pytest

from primal_attention.benchmarking.plans import MILLION
from primal_attention.benchmarking.targets import commits, verdicts

from .made_up import made_up

N = 4096


def verdict(rows, what, n=N):
    (found,) = [each for each in verdicts(rows) if each.what == what and each.n == n]
    return found


def rows(*, primal=0.9, **cells):
    return [
        made_up("projections", N, gpu_ms=0.6, wall_ms=0.7),
        made_up("softmax", N, gpu_ms=6.6, compiled_gpu_ms=6.0, peak_mib=700, wall_ms=7),
        made_up("released", N, weights="sampled", wall_ms=9.0),
        made_up("primal", N, weights="sampled", gpu_ms=primal, wall_ms=2.0, peak_mib=350, **cells),
    ]


def test_without_rows_nothing_is_measured():
    assert {each.met for each in verdicts([])} == {None}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("sampled / projections", 1.5),
        ("SDPA compiled / sampled", 6.0 / 0.9),
        ("released, wall / sampled", 10.0),
        ("peak memory, sampled / SDPA", 0.5),
    ],
)
def test_ratios(what, value):
    found = verdict(rows(), what)
    assert found.value == pytest.approx(value)
    assert found.met


def test_a_slow_layer_misses():
    slow = rows(primal=2.0)
    for what in ("sampled / projections", "SDPA compiled / sampled", "released, wall / sampled"):
        assert verdict(slow, what).met is False


def test_the_better_of_eager_and_compiled_counts():
    assert verdict(rows(primal=2.0, compiled_gpu_ms=0.9), "sampled / projections").met


def test_softmax_that_was_not_compiled_does_not_count():
    eager = [row | {"compiled_gpu_ms": ""} for row in rows()]
    assert verdict(eager, "SDPA compiled / sampled").met is None


def test_the_dual_and_the_causal_form_have_targets_of_their_own():
    forms = [
        *rows(),
        made_up("primal", N, weights="dual", gpu_ms=1.2),
        made_up("primal", N, weights="dual", causal=True, gpu_ms=1.8),
    ]
    assert verdict(forms, "dual / projections").met
    assert verdict(forms, "SDPA compiled / dual").met
    causal = verdict(forms, "dual, causal / not causal")
    assert causal.value == pytest.approx(1.5)
    assert causal.met is False


@pytest.mark.parametrize(("kind", "share", "met"), [("fwd", 0.69, False), ("bwd", 0.61, True)])
def test_the_op_alone(kind, share, met):
    op = [made_up("primal_op", 1024, weights="sampled", kind=kind, copy_share=share)]
    assert verdict(op, f"op / copy, {kind}, sampled", 1024).met is met


def test_a_million_tokens():
    row = made_up("primal", MILLION, weights="sampled", wall_ms=20)
    assert verdict([row], "tokens of one sequence in training", MILLION).met
    failed = row | {"wall_ms": "", "note": "out of memory"}
    assert verdict([failed], "tokens of one sequence in training", MILLION).met is False


@pytest.mark.parametrize(("released", "met"), [(140, True), (120, False)])
def test_on_a_cpu_wall_times_are_compared(released, met):
    walls = {"released_op": 1.5 * released, "scores_op": 100}
    on_cpu = [
        made_up(name, N, weights="sampled", tokens=N, wall_ms=wall) | {"dtype": "float32"}
        for name, wall in walls.items()
    ]
    assert verdict(on_cpu, "on a CPU, released op / op, sampled").met is met
    on_gpu = [row | {"gpu_ms": "1"} for row in on_cpu]
    assert verdict(on_gpu, "on a CPU, released op / op, sampled").met is None


def test_other_sizes_do_not_count():
    other = [row | {"dim": "256"} for row in rows()]
    more = [row | {"batch": "64"} for row in rows()]
    assert {each.met for each in verdicts([*other, *more])} == {None}
    assert commits(other) == [] and commits(rows()) == ["abc"]
