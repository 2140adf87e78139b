"""The page about trained runs: what is on it, what is not, and how a browser sees it."""

import logging
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.analysis import duality, spectrum
from primal_attention.analysis.report import data, write_report
from primal_attention.analysis.report.data import read_run
from primal_attention.analysis.report.page import (
    Chapter,
    DataTable,
    Fact,
    Illustration,
    Section,
    render,
)
from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import Recipe, launch, read_outcome, task_of, train_in
from primal_attention.training.results import add_rows, row_of

TASK = "uea/JapaneseVowels"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = ("<script>alert(1)</script>", '" onerror="alert(2)', r"$\frac{", "_&amp;\x00\u4e2d")


def report_page(directories, **options):
    """The text of a page."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "page.html"
        write_report(directories, out, **options)
        return out.read_text()


class Reader(HTMLParser):
    """All text and all attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.attributes = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text.append(data)

    def values(self, name):
        return [value for key, value in self.attributes if key == name]

    @property
    def words(self):
        return " ".join(" ".join(self.text).replace("\u00a0", " ").split())


def train_small(directory, recipe, task):
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    fabric = launch("fp32", accelerator="cpu", devices=1)
    return train_in(directory, recipe, task, fabric)


def small_recipe(model="primal_plus", **changes):
    sizes = {"dim": 16, "num_heads": 2, "ffn_dim": 17, "epochs": 3, "lr": 5e-3, "eta": 0.1}
    options = {"attention": {"num_directions": 3}} if model.startswith("primal") else {"eta": 0.0}
    return Recipe(TASK, model, **sizes | options | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def task():
    return task_of(small_recipe())


@pytest.fixture(scope="module")
def run(folder, task):
    """A run that is over, with a row in the results of its folder."""
    outcome = train_small(folder / "a/primal/seed0", small_recipe(), task)
    add_rows(folder / "results.csv", [row_of(outcome, "c0ffee123")])
    return folder / "a/primal/seed0"


@pytest.fixture(scope="module")
def others(folder, task):
    """The same with another seed, and another model, counted in steps."""
    train_small(folder / "a/primal/seed1", small_recipe(seed=1), task)
    steps = small_recipe("yoso", steps=13, eval_every=5)
    train_small(folder / "a/yoso/seed0", steps, task)
    return [folder / "a/primal/seed1", folder / "a/yoso/seed0"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A table with a number for the run."""
    place = tmp_path_factory.mktemp("suite")
    (place / "expected.toml").write_text(
        'title = "Table 7: of a test"\ndomain = "uea"\nmetric = "accuracy"\n'
        'protocols = ["clean"]\ncolumn = "model"\ncolumns = ["primal_plus"]\nheadings = ["P."]\n'
        'rows = [{ dataset = "JapaneseVowels", paper = [71.75] }]\n'
    )
    return place


@pytest.fixture(scope="module")
def page(run, suite):
    return report_page([run], cases=5, suite=suite)


@pytest.fixture(scope="module")
def page_of_three(run, others, suite):
    return report_page([run, *others], cases=3, suite=suite)


def toy_run(directory, labels, name="toy/toy"):
    """A run on cases of someone's own."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        target = torch.arange(count) % len(labels)
        x = torch.randn(count, 7, 5, generator=generator) + target[:, None, None]
        return Cases({"x": x}, target)

    task = Task(
        name, CLASSIFICATION, Sizes(7, len(labels), num_channels=5), some(31), some(13), some(23)
    )
    task = replace(task, labels=labels)
    train_small(directory, small_recipe().replace(task=name), task)
    return task


def test_the_headline_has_the_metric_and_the_papers_number(run, page):
    words, outcome = Reader(page).words, read_outcome(run)
    assert f"test accuracy {outcome.value:.4g}" in words
    assert "the paper 71.75 Table 7" in words
    assert f"validation accuracy {outcome.valid:.4g}" in words
    assert f"{sum(each.numel() for each in outcome.weights.values()):,}" in words
    assert "clean protocol, seed 0" in words


def test_every_section_is_there_and_linked(page):
    reader = Reader(page)
    names = ("curves", "predictions", "spectra", "primal", "settings", "environment")
    for name in names:
        assert name in reader.values("id")
        assert f"#{name}" in reader.values("href")


def test_curves_spectra_and_the_matrix_are_drawn(page):
    reader = Reader(page)
    addresses = reader.values("src")
    assert len(set(addresses)) == len(addresses) == 3 + 1 + 1
    assert all(each.startswith("data:image/svg+xml;base64,") for each in addresses)
    assert all(reader.values("alt"))


def test_spectra_and_duality_are_those_of_the_test_cases(run, task, page):
    model, words = read_run(run).model, Reader(page).words
    places = torch.arange(5) * len(task.test) // 5
    inputs = task.test[places].inputs
    for layer in spectrum(model, inputs).layers:
        assert str(layer.effective_rank) in words
    (layer,) = duality(model, inputs).layers
    for number in (layer.kkt, layer.objective, layer.explained, layer.best):
        assert str(number) in words


def test_classes_are_counted_right(run, task, page):
    words = Reader(page).words
    with torch.no_grad():
        taken_for = read_run(run).model(**task.test.inputs).argmax(-1)
    for index, label in enumerate(task.labels):
        members = task.test.target == index
        correct = int((taken_for[members] == index).sum())
        rate = f"{100 * correct / int(members.sum()):.1f} %"
        assert f" {label} {int(members.sum())} {correct} {rate} " in words
    assert f"Accuracy {read_outcome(run).value:.2f} on all {len(task.test)} test cases" in words


def test_settings_that_were_changed_come_first(page):
    words = Reader(page).words
    changed, every = words.split("All settings")
    assert "dim 16 512" in changed.split("What differs")[1]
    assert "attention.num_directions 3" in every
    assert "precision fp32" in every


def test_the_environment_is_that_of_the_row_of_the_run(run, others, page):
    words = Reader(page).words
    assert "commit c0ffee123" in words
    assert f"torch {torch.__version__}" in words
    assert "commit not recorded" in Reader(report_page(others[:1], cases=0)).words


def test_nothing_comes_from_outside(page, page_of_three):
    for each in (page, page_of_three):
        reader = Reader(each)
        assert "script" not in reader.tags
        assert "link" not in reader.tags
        for place in reader.values("src") + reader.values("href"):
            assert re.match("data:|#", place), place
        assert not re.search(r"(src|href|srcset|url\()\W*https?:", each)
        assert "default-src 'none'" in "".join(map(str, reader.values("content")))
        assert each.isascii()


def test_several_runs_are_compared(run, others, page_of_three):
    reader = Reader(page_of_three)
    words = reader.words
    values = [read_outcome(each).value for each in (run, *others)]
    assert "primal_plus, seed 0" in words
    assert "yoso, seed 0" in words
    assert all(f"accuracy {value:.4g}" in words for value in values)
    assert f"{sum(values[:2]) / 2:.1f} ±" in words
    assert "step 13" in words
    table = words.split("Settings in which the runs differ")[1]
    assert "model primal_plus primal_plus yoso" in table
    assert "batch_size" not in table.split("Learning curves")[0]
    for anchor in reader.values("href"):
        assert reader.values("id").count(anchor[1:]) == 1


def test_what_cannot_be_measured_says_why(page_of_three):
    words = Reader(page_of_three).words
    assert "outputs of yoso are unit vectors" in words
    assert "SequenceClassifier has no Primal layer" in words


def test_layers_with_a_decay_have_no_residual(tmp_path, task):
    train_small(tmp_path / "run", small_recipe("primalformer_time", epochs=1), task)
    words = Reader(report_page([tmp_path / "run"], cases=3)).words
    assert "have a decay, whose weights are another matrix at each token" in words
    assert "tower.encoder.blocks.1.attention primal_time" in words


def test_without_data_the_page_says_so(tmp_path):
    toy_run(tmp_path / "run", ("a", "b"))
    words = Reader(report_page([tmp_path / "run"])).words
    assert "the data are not at hand: no domain is called 'toy'" in words
    assert "Learning curves" in words
    assert "no cases were asked for" in Reader(report_page([tmp_path / "run"], cases=0)).words


def test_other_data_are_not_looked_at(run, task, monkeypatch, tmp_path):
    other = replace(task, encoding=replace(task.encoding, mean=task.encoding.mean + 1))
    monkeypatch.setattr(data, "task_of", lambda recipe, data: other)
    told = "not those that the model was trained on"
    assert told in Reader(report_page([run])).words
    with pytest.raises(ValueError, match=told):  # in a folder that was given it is a mistake
        write_report([run], tmp_path / "page.html", data=tmp_path)
    assert not list(tmp_path.iterdir())


def test_hostile_names_are_text(tmp_path, monkeypatch):
    name = "toy/<img src=x onerror=alert(3)>"
    task = toy_run(tmp_path / "<b>", HOSTILE, name)
    monkeypatch.setattr(data, "task_of", lambda recipe, data: task)
    page = report_page([tmp_path / "<b>"], cases=3)
    reader = Reader(page)
    assert "script" not in reader.tags
    assert "b" not in reader.tags
    assert not reader.values("onerror")
    assert not [value for value in reader.values("src") if not value.startswith("data:")]
    for text in (*HOSTILE[:3], name):
        assert text in reader.words


def page_of(text):
    """A page with the text in every place that has one."""
    tables = [DataTable([text], [[text]], text, folded) for folded in (False, True)]
    section = Section(text, text, [text], [Illustration(text, text)], tables)
    chapter = Chapter(text, text, [Fact(text, text, text)], [text], [section] * 2)
    return [Reader(render(text, text, [chapter] * number)) for number in (1, 2)]


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_comes_out_as_it_went_in(text):
    text = f"x{text}".replace(" ± ", "\u00a0±\u00a0")
    for reader, harmless in zip(page_of(text), page_of("x"), strict=True):
        assert reader.tags == harmless.tags
        assert reader.text.count(text) == harmless.text.count("x") > 20
        for name in ("aria-label", "alt", "src"):
            assert reader.values(name).count(text) == harmless.values(name).count("x") > 1


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(old, new):
    def change(directory):
        path = directory / "result.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (shutil.rmtree, "no run directory is at"),
        (lambda run: (run / "result.json").unlink(), "there is no result.json; the same primal"),
        (lambda run: cut(run / "result.json"), "result.json is not the outcome"),
        (lambda run: (run / "result.json").write_text("[]"), "result.json is not the outcome"),
        (changed('"best": ', '"best": 9'), "result.json is not the outcome.*cannot be the best"),
        (changed('"valid_loss"', '"lost"'), "result.json is not the outcome.*valid_loss"),
        (changed('"train_loss": ', '"train_loss": null, "x": '), "train_loss of round 0 is None"),
        (
            changed('"dim": 16', '"dim": 32'),
            "best.safetensors is not the checkpoint of .*result.json",
        ),
        (lambda run: (run / "best.safetensors").unlink(), "no checkpoint is at"),
        (lambda run: cut(run / "best.safetensors"), "best.safetensors is no safetensors file"),
    ],
)
def test_broken_runs_are_named_and_nothing_is_written(run, tmp_path, harm, told):
    copy = shutil.copytree(run, tmp_path / "run")
    harm(copy)
    out = tmp_path / "page.html"
    out.write_text("what was there before")
    with pytest.raises((ValueError, OSError), match=told):
        write_report([run, copy], out)
    assert out.read_text() == "what was there before"
    assert {each.name for each in tmp_path.iterdir()} <= {"run", "page.html"}


def test_mistakes_are_named(run, tmp_path):
    with pytest.raises(ValueError, match="out must be a file in a folder that exists"):
        write_report([run], tmp_path / "no" / "page.html")
    with pytest.raises(ValueError, match=r"got .*seed0 twice"):
        write_report([run, run / "../seed0"], tmp_path / "page.html")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="cases must not be negative, got -1"):
        write_report([run], tmp_path / "page.html", cases=-1)
    with pytest.raises(ValueError, match="data must be a folder that exists, got nowhere"):
        write_report([run], tmp_path / "page.html", data=Path("nowhere"))
    assert not list(tmp_path.iterdir())


MEASURE = """<script>addEventListener("load", () => {
  const images = [...document.images];
  document.body.dataset.all = images.length;
  document.body.dataset.seen = images.filter(i => i.complete && i.naturalWidth > 99).length;
  document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth;
});</script></body>"""


def browse(path: Path, profile: Path, *options) -> subprocess.CompletedProcess:
    """The page in a browser that cannot reach a network."""
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"),
        *("--enable-logging=stderr", *options, "--dump-dom", path.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(seen: subprocess.CompletedProcess) -> list[str]:
    return [line for line in seen.stderr.splitlines() if "CONSOLE" in line]


def measured(page: str) -> str:
    """The page with a script that counts the figures that were drawn."""
    assert page.count("default-src 'none'") == 1
    return page.replace("</body>", MEASURE).replace(
        "default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'"
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_every_figure_and_complains_of_nothing(page, page_of_three, tmp_path):
    for number, each in enumerate((page, page_of_three)):
        path = tmp_path / f"{number}.html"
        path.write_text(each)
        as_it_is = browse(path, tmp_path / "profile")
        assert console(as_it_is) == []
        path.write_text(measured(each))
        seen = browse(path, tmp_path / "profile", "--window-size=500,900")
        assert console(seen) == []
        found = dict(re.findall(r'data-(all|seen|wide)="(-?\d+)"', seen.stdout))
        figures = each.count("<figure>")
        assert figures >= 5
        assert found["all"] == found["seen"] == str(figures)
        assert int(found["wide"]) <= 0  # nothing but tables scrolls sideways


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_browser_would_complain(page, tmp_path):
    broken = page.replace("data:image/svg+xml;base64,", "https://example.org/", 2)
    (tmp_path / "page.html").write_text(broken)
    assert console(browse(tmp_path / "page.html", tmp_path / "profile"))
