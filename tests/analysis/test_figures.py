"""Figure 1 and the tables."""

import pytest
import torch

from primal_attention import build_attention
from primal_attention.analysis import figure1, plot_spectra, spectrum
from primal_attention.analysis.plot_style import save_figure
from primal_attention.analysis.spectrum import curve_rows, layer_rows

D, H, N = 10, 2, 13


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def stack(*names):
    return torch.nn.Sequential(*(build_attention(name, D, H) for name in names))


def test_one_call_draws_the_four_panels():
    data = [torch.randn(3, N, D)]
    softmax, primal = stack(*["softmax"] * 5), stack(*["softmax"] * 4, "primal")
    figure = figure1(softmax, primal, data)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["(a) layer 0", "(b) layer 2", "(c) layer 4", "(d) all layers"]
    for axes in figure.axes:
        assert axes.get_xlabel() == "directions"
        assert axes.get_ylabel() == "cumulative explained variance"
    last, depth = figure.axes[2], figure.axes[3]
    assert [line.get_label() for line in last.lines] == ["softmax (softmax)", "Primal (primal)"]
    assert len(last.collections) == 2, "a band for each"
    assert len(depth.lines) == 10
    expected = spectrum(softmax, data)[4].explained
    drawn = torch.as_tensor(last.lines[0].get_ydata())
    torch.testing.assert_close(drawn, expected)


def test_every_model_is_drawn():
    one = spectrum(stack("softmax"), torch.randn(1, N, D))
    figure = plot_spectra({f"model {index}": one for index in range(9)})
    assert len(figure.axes[0].lines) == len(figure.axes[-1].lines) == 9


def test_layers_can_be_chosen_and_are_checked():
    spectra = {"model": spectrum(stack("softmax", "linear"), torch.randn(1, N, D))}
    figure = plot_spectra(spectra, layers=[-1])
    assert [axes.get_title() for axes in figure.axes] == ["(a) layer 1", "(b) all layers"]
    titles = [axes.get_title() for axes in plot_spectra(spectra).axes]
    assert titles == ["(a) layer 0", "(b) layer 1", "(c) all layers"], "no panel stays empty"
    for layers in ([2], [], [0, 0, 0, 0]):
        with pytest.raises(ValueError, match="layers must be one to three indices below 2"):
            plot_spectra(spectra, layers=layers)
    with pytest.raises(ValueError, match="spectra must hold"):
        plot_spectra({})


def test_an_iterator_cannot_be_read_twice():
    with pytest.raises(ValueError, match="data is an iterator"):
        figure1(stack("softmax"), stack("primal"), iter([torch.randn(1, N, D)]))


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    figure = plot_spectra({"model": spectrum(stack("softmax"), torch.randn(1, N, D))})
    save_figure(figure, tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")

    def fails(path, **options):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        save_figure(figure, tmp_path / "other.png")
    assert [each.name for each in tmp_path.iterdir()] == ["spectrum.png"]


def test_tables_have_a_row_for_each_layer_and_direction():
    model = stack("softmax", "primal")
    spectra = {"ours": spectrum(model, torch.randn(2, N, D))}
    layers = layer_rows(spectra)
    measures = ("num_tokens", "directions", "effective_rank", "entropy", "asymmetry", "redundancy")
    numbers = [f"{name}{end}" for name in measures for end in ("", "_deviation")]
    first = ["model", "layer", "attention"]
    assert list(layers[0]) == [*first, "head_dim", "num_matrices", *numbers]
    assert [row["attention"] for row in layers] == ["softmax", "primal"]
    assert float(layers[0]["entropy"]) > 0
    assert layers[1]["entropy"] == "nan"
    curves = curve_rows(spectra)
    last = ["direction", "singular_value", "explained", "explained_deviation"]
    assert list(curves[0]) == [*first, *last]
    of_softmax = [row for row in curves if row["layer"] == "0"]
    assert [int(row["direction"]) for row in of_softmax] == list(range(1, N + 1))
    assert float(of_softmax[-1]["explained"]) == pytest.approx(1)
