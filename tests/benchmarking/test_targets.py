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
    assert verdict([row], "primal, tokens of one sequence", MILLION).met
    failed = row | {"wall_ms": "", "note": "out of memory"}
    assert verdict([failed], "primal, tokens of one sequence", MILLION).met is False


def host_row(weights, n, batch, *, causal=False, kind="fwd+bwd", **walls):
    row = made_up("primal", n, weights=weights, causal=causal, kind=kind, **walls)
    return row | {"batch": str(batch)}


@pytest.mark.parametrize(
    ("weights", "causal", "wall", "met"),
    [
        ("static", False, 1.2, True),
        ("sampled", False, 1.4, False),
        ("dual", False, 1.5, True),
        ("static", True, 1.5, True),
        ("dual", True, 1.7, False),
    ],
)
def test_small_steps(weights, causal, wall, met):
    row = host_row(weights, 512, 8, causal=causal, wall_ms=wall, compiled_wall_ms=1.5)
    name = f"{weights}{', causal' if causal else ''}"
    assert verdict([row], f"{name}, eager step of 8, ms", 512).met is met
    assert verdict([row], f"{name}, compiled step of 8, ms", 512).met


def test_a_small_forward_pass():
    row = host_row("sampled", 128, 1, kind="fwd", wall_ms=0.3)
    assert verdict([row], "sampled, eager forward, ms", 128).met is False


@pytest.mark.parametrize(("wall", "met"), [(1.4, True), (1.6, False)])
def test_large_eager_steps_wait_for_the_device(wall, met):
    row = made_up("primal", 1024, weights="dual", gpu_ms=1.0, wall_ms=wall)
    assert verdict([row], "primal, dual, eager wall / GPU", 1024).met is met


@pytest.mark.parametrize(("kind", "wall", "met"), [("step", 0.2, True), ("decode", 0.1, False)])
def test_decoding(kind, wall, met):
    row = host_row("dual", 8192, 64, causal=True, kind=kind, wall_ms=wall)
    assert verdict([row], f"dual, {kind} of 64, ms", 8192).met is met


def test_linear_attention_and_a_learned_time():
    rows = [
        made_up("linear", 1024, causal=True, gpu_ms=1.9),
        made_up("softmax", 1024, causal=True, peak_mib=600, gpu_ms=2),
        made_up("primal_time", 1024, causal=True, weights="dual", gpu_ms=2.5, peak_mib=700),
        made_up("primal_time", MILLION, weights="dual", gpu_ms=40, wall_ms=40),
    ]
    assert verdict(rows, "linear, causal, ms", 1024).met
    assert verdict(rows, "primal_time, causal, ms", 1024).met is False
    assert verdict(rows, "peak memory, primal_time, causal / SDPA", 1024).met
    assert verdict(rows, "primal_time, tokens of one sequence", MILLION).met


def test_other_sizes_do_not_count():
    other = [row | {"dim": "256"} for row in rows()]
    more = [row | {"batch": "64"} for row in rows()]
    assert {each.met for each in verdicts([*other, *more])} == {None}
    assert commits(other) == [] and commits(rows()) == ["abc"]
