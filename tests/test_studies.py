"""The programs of the studies: what they train, what they measure, what they write."""

import csv
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from primal_attention import build_attention
from primal_attention.attention import ATTENTIONS
from primal_attention.attention.primal import PrimalAttention
from primal_attention.tasks import Cases, Sizes
from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.tasks.lra.texts import byte_tokens
from primal_attention.training import DOMAINS, build_model, find_recipe
from primal_attention.training.results import key_of, read_rows

ROOT = Path(__file__).parents[1] / "reproduction"
STUDIES = [
    *(
        f"primal_attention/ablations/{path.parent.name}"
        for path in sorted(ROOT.glob("primal_attention/ablations/*/recipes.py"))
    ),
    "primal_attention/figure1_spectrum",
    "primal_dual/attention_bn_sh",
]
TINY = ("epochs=1", "dim=32", "ffn_dim=32", "num_heads=4")


@pytest.fixture(autouse=True)
def programs_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipes_of(study):
    return list(importlib.import_module("run").table_recipes(study))


def parameters_of(recipe, tokens):
    with torch.device("meta"):
        model = build_model(recipe, Sizes(tokens, 8, num_channels=3))
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("study", STUDIES)
def test_recipes_can_be_built_and_come_seed_by_seed(study):
    recipes = [each for each in recipes_of(study) if each.domain in ("uea", "lra")]
    for recipe in recipes:
        if recipe.run.seed == 0:
            symbols = None if recipe.domain == "uea" else 17
            channels = 3 if symbols is None else None
            with torch.device("meta"):
                build_model(recipe, Sizes(29, 8, num_channels=channels, vocab_size=symbols))
    short = [each.run.seed for each in recipes if each.task == recipes[0].task] if recipes else []
    assert short == sorted(short)


def test_networks_are_of_equal_size():
    tokens = {"UWaveGestureLibrary": 315, "Handwriting": 152, "JapaneseVowels": 26}
    recipes = [
        each for each in recipes_of("primal_attention/ablations/parameters") if each.run.seed == 0
    ]
    assert len(recipes) == 4 * len(tokens)
    for name, number in tokens.items():
        softmax, primal, wider, narrower = (
            parameters_of(each, number) for each in recipes if each.task == f"uea/{name}"
        )
        assert wider == pytest.approx(softmax, rel=1e-3)
        assert narrower == pytest.approx(primal, rel=1e-3)
        assert primal < 0.99 * softmax


def test_runs_are_trained_measured_and_then_left_alone(tmp_path, monkeypatch, capsys):
    spectra = importlib.import_module("spectra")
    measuring = importlib.import_module("measuring")
    table = "primal_attention/ablations/objective"
    words = [table, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--curves"]
    chosen = ["--select", "dataset=JapaneseVowels", "seed=0", "eta=0.0", "--set", *TINY]
    monkeypatch.setattr(sys, "argv", ["spectra.py", *words, *chosen])
    for _ in range(2):
        arguments = measuring.parse_arguments("", "--curves")
        measure = spectra.partial(spectra.measure, with_curves=True)
        measuring.main(measure, "curves.csv", arguments)
    assert "1 recipes, 1 measured" in capsys.readouterr().out
    (run,) = read_rows(tmp_path / table / "results.csv")
    layers = measuring.read_numbers(tmp_path / table / "spectra.csv")
    assert [row["layer"] for row in layers] == ["0", "1"]
    assert {row["settings"] for row in layers} == {run["settings"]}
    assert all(0 < float(row["subspaces"]) <= float(row["best"]) <= 1 + 1e-9 for row in layers)
    curves = measuring.read_numbers(tmp_path / table / "curves.csv")
    explained = [float(row["explained"]) for row in curves if row["layer"] == "1"]
    assert explained == sorted(explained)
    assert explained[-1] == pytest.approx(1)


def test_figure_1_is_drawn_from_its_curves(tmp_path):
    draw = load(ROOT / "primal_attention/figure1_spectrum/draw.py")
    row = {"attention": "softmax", "layer": "0", "deviation": "0.1"}
    models = [
        ("softmax", ""),
        ("primal_plus", "eta=0.1"),
        ("primal_plus", "norm=pre"),
        ("primal_plus", "eta=0.1 objective=explained_energy"),
        ("primal_plus", "eta=2e-07 objective=zero"),
    ]
    rows = [
        {
            **row,
            "model": model,
            "settings": settings,
            "seed": seed,
            "direction": place,
            "explained": str(0.2 * int(place) + 0.1 * int(seed)),
        }
        for model, settings in models
        for seed in "01"
        for place in "12"
    ]
    found = draw.spectra(rows)
    assert next(iter(found)) == "softmax" and len(found) == len(models)
    torch.testing.assert_close(found["softmax"][0].explained, torch.tensor([0.25, 0.45]))


def corrupted(name, level, x, mask):
    robustness = importlib.import_module("robustness")
    cases = Cases({"x": x, "token_mask": mask}, torch.zeros(len(x)))
    found = {(kind, each): changed for kind, each, changed in robustness.corrupted(cases)}
    return found[name, level].inputs["x"]


def test_corruptions_change_real_tokens_alone():
    x, mask = torch.randn(3, 23, 5), torch.arange(23) < torch.tensor([[23], [20], [1]])
    x[~mask] = 7.0
    for name, level in [("noise", 0.5), ("offset", 1.0), ("scale", 2.0), ("delay", 0.1)]:
        changed = corrupted(name, level, x, mask)
        assert (changed[~mask] == 7).all()
        assert not torch.equal(changed[0], x[0])
    torch.testing.assert_close(corrupted("none", 0.0, x, mask)[mask], x[mask])
    torch.testing.assert_close(corrupted("offset", 1.0, x, mask)[mask], x[mask] + 1)
    delayed = corrupted("delay", 0.1, x, mask)
    torch.testing.assert_close(delayed[1, :20], x[1, :20].roll(2, 0))  # a tenth of 20 tokens
    torch.testing.assert_close(delayed[2, :1], x[2, :1])


def test_the_target_of_reverse_is_the_sequence_backwards():
    cross = importlib.import_module("cross")
    cases = cross.reversed_cases(7, torch.Generator().manual_seed(0))
    for x, mask, target in zip(*cases.inputs.values(), cases.target, strict=True):
        assert target[mask].tolist() == x[mask].tolist()[::-1]
        assert (target[~mask] == cross.PADDING).all()


@pytest.mark.parametrize("place", range(4))
def test_a_decoder_sees_its_source_through_cross_attention_alone(place):
    cross = importlib.import_module("cross")
    recipe = recipes_of(cross.TABLE)[place]
    torch.manual_seed(0)
    model = cross.build(recipe, Sizes(23, 16, vocab_size=16)).eval()
    x, mask = torch.randint(16, (2, 23)), torch.arange(23) < torch.tensor([[23], [11]])
    y = model(x, mask)
    assert y.shape == (2, 23, 16)
    other = torch.where(mask, x, (x + 1) % 16)
    torch.testing.assert_close(model(other, mask), y)
    assert not torch.allclose(model((x + 1) % 16, mask), y)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.out_proj.weight)
    torch.testing.assert_close(model((x + 1) % 16, mask), model(x, mask))


def test_cross_attention_is_trained_by_the_ordinary_loop(monkeypatch):
    cross = importlib.import_module("cross")
    monkeypatch.setitem(DOMAINS, "cross", cross.CROSS)
    threads = torch.get_num_threads()
    recipe = recipes_of(cross.TABLE)[0].with_settings(["steps=2", "eval_every=1"])
    row = cross.run_one(recipe, "abcdef0")
    torch.set_num_threads(threads)
    assert row.items() >= key_of(recipe).items()
    assert 0 < float(row["value"]) < 100


@pytest.mark.parametrize("name", ["softmax", "softmax_sh"])
def test_operations_are_counted_as_torch_counts_them(name):
    cost = load(ROOT / "primal_dual/attention_bn_sh/cost.py")
    layer = build_attention(name, cost.DIM, cost.HEADS)
    spelled_out = sdpa_kernel(SDPBackend.MATH)  # the fused form of a CPU is not counted
    with FlopCounterMode(display=False) as counter, torch.no_grad(), spelled_out:
        layer(torch.randn(1, 64, cost.DIM))
    assert counter.get_total_flops() == pytest.approx(cost.operations(name, 64), rel=0.01)


def test_costs_are_measured_on_any_device(tmp_path, monkeypatch, capsys):
    cost = load(ROOT / "primal_dual/attention_bn_sh/cost.py")
    words = ["cost.py", "--tokens", "16", "--total", "32", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(cost, "REPEATS", 1)
    cost.main()
    lines = (tmp_path / "cost.csv").read_text().splitlines()
    assert len(lines) == 1 + 8 + 4  # each layer, and softmax ones spelled out


def test_the_steps_of_table_3_are_timed_for_what_is_selected(tmp_path):
    program = ROOT / "primal_attention/table3_efficiency/measure.py"
    chosen = ["--select", "dataset=image", "model=linformer,none", "protocol=clean", "seed=0"]
    small = ["--set", *TINY[1:], "batch_size=2", "num_layers=1"]
    words = [sys.executable, program, "--steps", "1", "--out", tmp_path, *chosen, *small]
    subprocess.run(words, check=True, cwd=ROOT.parent, timeout=120)
    (row,) = read_rows(tmp_path / "results.csv")
    assert (row["dataset"], row["model"], row["protocol"]) == ("image", "linformer", "clean")
    assert float(row["value"]) > 0


def test_a_recipe_can_make_any_mechanism_causal():
    sizes = Sizes(29, 8, num_channels=3)
    for model in ("softmax", "primalformer", "primal_plus"):
        recipe = find_recipe("uea/JapaneseVowels", model, "clean").with_settings(TINY)
        causal = recipe.with_settings(["attention.causal=true"])
        kinds = tuple(ATTENTIONS.values())
        for each, expected in ((recipe, False), (causal, True)):
            layers = [m for m in build_model(each, sizes).modules() if isinstance(m, kinds)]
            assert [layer.causal for layer in layers] == [expected] * 2
        last = layers[-1]
        assert not isinstance(last, PrimalAttention) or last.weights == "static"


def test_counting_tells_reviews_that_share_a_word_from_others(tmp_path, monkeypatch):
    """Reviews 2 i and 2 i + 1 are of film i, whose name no other review has."""
    texts = [b"a film of plot%c and cast" % (97 + i // 2) for i in range(24)]
    rng = np.random.default_rng(0)
    films = np.arange(36) % 12  # 4 films for each part
    same = np.arange(36) // 12 % 2 == 0
    others = np.where(same, films, (films + 1) % 4 + films // 4 * 4)
    pairs = np.stack([2 * films, 2 * others + 1], 1)
    order = np.argsort(films // 4, kind="stable")
    sizes = PartSizes(12, 12, 12)
    made = PreparedTask(
        "retrieval-imdb",
        sizes,
        byte_tokens(texts),
        same[order].astype(np.uint8),
        rng.permuted(pairs[order], axis=1).astype(np.int32),
    )
    LRA.write(tmp_path / "retrieval-imdb.npz", made)
    module = load(ROOT / "primal_attention/table2_lra/baselines.py")
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["", "--data", str(tmp_path), "--out", str(out)])
    module.main()
    with out.open() as file:
        rows = {row["symbols"]: float(row["value"]) for row in csv.DictReader(file)}
    assert list(rows) == ["bytes", "three bytes", "words"]
    assert rows["words"] == 100
