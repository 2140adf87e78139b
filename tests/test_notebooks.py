"""The notebooks: valid, small, executed from top to bottom, free of errors and of paths."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
SHORTENED = re.compile(r"\b(epochs|steps)(\"?(?:=|: ))[1-9]\d*")  # training takes the time


def test_there_are_three():
    assert [path.stem for path in PATHS] == ["patch_a_transformer", "spectra", "time_series"]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    nbformat = pytest.importorskip("nbformat", reason="pip install 'primal-attention[test]'")
    return nbformat.read(path, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_valid_and_small(path, notebook):
    import nbformat

    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000


def test_it_was_run_in_order_without_an_error(notebook):
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {each.output_type for each in outputs} <= {"stream", "display_data", "execute_result"}
    assert [each.text for each in outputs if each.get("name") == "stderr"] == []
    assert [cell.source for cell in cells if "print(" in cell.source and not cell.outputs] == []


def test_it_has_pictures(notebook):
    pictures = [
        output.data["image/png"]
        for cell in code_of(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    drawing = [
        cell for cell in code_of(notebook) if re.search(r"subplots\(|figure1\(", cell.source)
    ]
    assert len(pictures) == len(drawing) > 0


def test_nothing_of_a_machine_is_in_it(path, notebook):
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert re.findall(r"(?:/home|/root|/Users|/tmp|/work|site-packages|[A-Z]:\\\\)\S*", text) == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_its_code_runs(notebook, monkeypatch, tmp_path):
    """Cell by cell, with the least of training."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(code_of(notebook), 1):
        source = SHORTENED.sub(r"\1\g<2>1", cell.source)
        exec(compile(source, f"cell {number}", "exec"), names)
    plt.close("all")
