"""The figure, from rows that are made up."""

import builtins

import pytest

from primal_attention.analysis.plot_style import new_figure
from primal_attention.benchmarking import plots
from primal_attention.benchmarking.plots import lines_of, plot

from .made_up import by_length, made_up

ROWS = [
    *by_length("projections", {256: 0.6, 1024: 0.6, 4096: 0.6}),
    *by_length("softmax", {256: 2, 1024: 3, 4096: 6}, peak_mib=700, compiled_gpu_ms=2),
    *by_length("primal", {256: 1, 1024: 0.9, 4096: 0.9}, weights="dual", roofline_ms=0.1),
    *by_length("primal", {1048576: 20}, weights="dual"),
    made_up("released", 256, weights="sampled", wall_ms=9, note="host synchronisation in f"),
    made_up("crossover", 300, weights="dual"),
]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are made."""
    made = []

    def make(width, height):
        made.append(new_figure(width, height))
        return made[-1]

    monkeypatch.setattr(plots, "new_figure", make)
    return made


def test_three_panels_against_the_length(figures, tmp_path):
    plot(ROWS, tmp_path / "bench.png", title="a card")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]
    (figure,) = figures
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "GPU time, ms",
        "peak memory, MiB",
        "time / time of the projections",
    ]
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    assert "a card\nD=512, H=8, s=32, bfloat16, 65,536 tokens" in figure.get_suptitle()
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn["primal dual"] == [1, 0.9, 0.9]
    assert drawn["roofline"] == [0.1] * 3
    assert {"bare projections (floor)", "softmax (SDPA), compiled"} <= drawn.keys()
    ratios = {line.get_label(): list(line.get_ydata()) for line in figure.axes[2].lines}
    assert ratios["primal dual"] == pytest.approx([1 / 0.6, 1.5, 1.5])


def test_what_was_not_captured_has_its_wall_time():
    lines = {line.label: line.times for line in lines_of(ROWS[:-1])}
    assert lines["released sampled, wall time"] == {256: 9.0}


def test_nothing_to_draw_is_an_error_and_no_file(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(ROWS[-1:], tmp_path / "bench.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    imported = builtins.__import__

    def found(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", found)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'primal-attention\[train\]'"):
        plot(ROWS, tmp_path / "bench.png")
