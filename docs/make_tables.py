"""Write the tables of numbers of README.md and of the pages from the rows of our measurements.

    python docs/make_tables.py

A page marks the place of a table with the line `<!-- table NAME -->`; the table follows it. A test
fails where a page has other numbers than the rows.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "reproduction/primal_attention"
MEASURED = ROOT / "benchmarks/results"
H200 = MEASURED / "h200_torch2.11.0_2026-11-16.csv"
PLACE = re.compile(r"(<!-- table (\w+) -->\n)((?:\|.*\n)*)")
TABLES: dict[str, Callable[[], str]] = {}


def table(function: Callable[[], str]) -> Callable[[], str]:
    """Register the function under its name."""
    TABLES[function.__name__] = function
    return function


def filled(text: str) -> str:
    """The text of a page with all of its tables made anew."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]](), text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(heads: Iterable[str], lines: Iterable[Iterable[str]], *, words: int = 1) -> str:
    """A table whose first columns hold words and whose other columns hold numbers."""
    heads = list(heads)
    rule = ["---"] * words + ["--:"] * (len(heads) - words)
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *lines))


# Layers on one H200

LENGTHS = ("1024", "4096", "16384", "65536")
ALL_LENGTHS = ("256", *LENGTHS)
LAYERS = {  # mechanism, weights, causal
    ("projections", "", "False"): "projections alone",
    ("softmax", "", "False"): "softmax attention (SDPA)",
    ("softmax", "", "True"): "softmax attention (SDPA), causal",
    ("primal", "static", "False"): "Primal, static weights",
    ("primal", "sampled", "False"): "Primal, sampled weights",
    ("primal", "dual", "False"): "Primal, dual weights",
    ("primal", "static", "True"): "Primal, static weights, causal",
    ("primal", "dual", "True"): "Primal, dual weights, causal",
    ("released", "sampled", "False"): "released layer, sampled weights",
}
RELEASED = ("released", "sampled", "False")
IN_README = ("projections alone", "softmax attention (SDPA)", "Primal, sampled weights")


def layers(kind: str = "fwd+bwd") -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of one pass by mechanism, weights, causality and length."""
    return {
        (row["mechanism"], row["weights"], row["causal"], row["n"]): row
        for row in rows_of(H200)
        if (row["pass"], row["dtype"]) == (kind, "bfloat16")
    }


def milliseconds(row: dict[str, str], column: str = "gpu_ms") -> str:
    return f"{float(row[column]):.2f}" if row[column] else ""


@table
def speed() -> str:
    """Milliseconds of the GPU and the peak of the memory, by the length of a sequence."""
    rows, lines = layers(), []
    for layer, name in LAYERS.items():
        if name in IN_README or layer == ("primal", "dual", "True"):
            mine = [rows[(*layer, n)] for n in LENGTHS]
            peaks = sorted(round(float(row["peak_mib"])) for row in mine)
            peak = f"{peaks[0]} MiB" if peaks[0] == peaks[-1] else f"{peaks[0]} to {peaks[-1]} MiB"
            lines.append([name, *map(milliseconds, mine), peak])
    return markdown(["tokens of a sequence", *map(thousands, LENGTHS), "peak memory"], lines)


def thousands(n: str) -> str:
    return f"{int(n):,}"


@table
def training_time() -> str:
    """GPU milliseconds of forward and backward, all forms."""
    rows = layers()
    lines = [
        [name, *(milliseconds(rows[(*key, n)]) for n in ALL_LENGTHS)]
        for key, name in LAYERS.items()
    ]
    compiled = [
        milliseconds(rows[("softmax", "", "False", n)], "compiled_gpu_ms") for n in ALL_LENGTHS
    ]
    lines.insert(2, ["softmax attention (SDPA), compiled", *compiled])
    calls = [milliseconds(rows[(*RELEASED, n)], "wall_ms") for n in ALL_LENGTHS]
    lines[-1] = [f"{LAYERS[RELEASED]}, wall time", *calls]  # it cannot be recorded as a graph
    return markdown(["ms, forward and backward", *map(thousands, ALL_LENGTHS)], lines)


@table
def training_memory() -> str:
    """Peak MiB of forward and backward, all forms."""
    rows = layers()
    lines = [
        [name, *(f"{float(rows[(*key, n)]['peak_mib']):.0f}" for n in ALL_LENGTHS)]
        for key, name in LAYERS.items()
    ]
    return markdown(["peak MiB, forward and backward", *map(thousands, ALL_LENGTHS)], lines)


@table
def crossover() -> str:
    """The length from which on a form is faster than softmax attention."""
    rows = [row for row in rows_of(H200) if row["mechanism"] == "crossover"]
    found = {(row["weights"], row["causal"], row["pass"]): row["n"] for row in rows}
    lines = []
    for (mechanism, weights, causal), name in LAYERS.items():
        if mechanism == "primal":
            ends = [found[weights, causal, kind] for kind in ("fwd+bwd", "fwd")]
            lines.append([name, *("256, the shortest" if n == "256" else n for n in ends)])
    return markdown(["faster than softmax attention from", "training", "forward alone"], lines)


# Patched models


def patched(path: Path) -> str:
    """Tokens a second of the host, and the ratio after patching, by model, pass and length."""
    found = defaultdict(dict)
    for row in rows_of(path):
        form = "all, dual" if row["weights"] == "dual" else row["patched"]
        found[row["model"], row["pass"], int(row["tokens"])][form] = row
    lines = []
    for (model, kind, tokens), forms in sorted(found.items()):
        ratios = (forms.get(form) for form in ("last", "all", "all, dual"))
        cells = [f"{float(row['against_unpatched']):.2f}" if row else "" for row in ratios]
        host = float(forms["none"]["tokens_per_s"])
        rate = f"{float(f'{host:.3g}'):,.0f}"
        lines.append([NAMES[model], PASSES[kind], f"{tokens:,}", rate, *cells])
    heads = ["host", "pass", "tokens", "tokens/s before"]
    heads += ["last layer", "all layers", "all layers, dual weights"]
    return markdown(heads, lines, words=2)


NAMES = {"bert-base": "BERT-base", "gpt2": "GPT-2 small", "minilm": "MiniLM"}
PASSES = {"fwd+bwd": "training", "fwd": "forward"}


@table
def patched_gpu() -> str:
    return patched(MEASURED / "patched_h200_torch2.11.0.csv")


@table
def patched_cpu() -> str:
    return patched(MEASURED / "patched_x86_64-cpu_torch2.13.0.csv")


@table
def epochs() -> str:
    """The time of an epoch of PrimalFormer over that of softmax, by length."""
    rows = [
        row
        for row in rows_of(MEASURED / "epoch_h200_torch2.11.0.csv")
        if row["model"] == "primalformer"
    ]
    lengths = sorted({int(row["tokens"]) for row in rows})
    found = {(row["protocol"], int(row["tokens"])): row["against_softmax"] for row in rows}
    lines = [
        [name, *(f"{float(found[protocol, n]):.2f}" for n in lengths)]
        for protocol, name in (("paper", "without masks"), ("clean", "with masks"))
    ]
    return markdown(["time of an epoch over softmax's", *(f"{n:,}" for n in lengths)], lines)


# Decompositions of large kernel matrices


@table
def kernel_svd() -> str:
    """Time, memory and error of the solvers of ``KernelSVD``."""
    names = {
        "rbf": "RBF, median heuristic",
        "attention": r"$e^{\langle W_q x, W_k z\rangle/\sqrt{d}}$",
    }
    lines = []
    for row in rows_of(MEASURED / "kernel_svd_x86_64-cpu_torch2.13.0_2026-11-15.csv"):
        solver = row["solver"].removeprefix("plain ")
        plain = ", `n_iter=0`" if solver != row["solver"] else ""
        numbers = [row["sigma_ratio"], row["seconds"], row["peak_mib"]]
        error = f"{float(row['max_error']):.2g}"
        lines.append([names[row["kernel"]], f"`{solver}`{plain}", *numbers, error])
    heads = ["kernel", "solver", r"$\sigma_{32}/\sigma_1$", "seconds", "peak MiB"]
    return markdown([*heads, "largest error of the singular values"], lines, words=2)


# How large the output of a layer starts

STARTS = {
    ("softmax", "", False): "softmax attention",
    ("softmax", "", True): "softmax attention, causal",
    ("primalformer", "sampled", False): "sampled weights",
    ("primalformer", "static", False): "static weights",
    ("primalformer", "static", True): "static weights, causal",
    ("primalformer", "dual", False): "dual weights",
    ("primalformer", "dual", True): "dual weights, causal",
}


@table
def norms() -> str:
    """Norms in the last layer of a classifier on JapaneseVowels, before training."""
    found = defaultdict(list)
    for row in rows_of(STUDIES / "ablations/causal/norms.csv"):
        settings = dict(part.split("=") for part in row["settings"].split())
        weights = settings.get("attention.weights", "sampled" * row["model"].startswith("primal"))
        key = (row["model"], weights, settings.get("attention.causal") == "true")
        if row["dataset"] == "JapaneseVowels" and key in STARTS:
            found[key].append([float(row[name]) for name in ("residual", "output", "varying")])
    lines = []
    for key, name in STARTS.items():
        residual, output, varying = map(fmean, zip(*found[key], strict=True))
        lines.append([name, f"{residual:.1f}", f"{output:.2f}", f"{varying:.2f}"])
    return markdown(["norm of", "input", "output", "its part that varies over tokens"], lines)


# Offline reinforcement learning

D4RL = STUDIES / "table4_d4rl"


@table
def d4rl_sets() -> str:
    """Behaviour, size and scores of the D4RL-like sets."""
    lines, behaviours = [], defaultdict(list)
    rows = rows_of(D4RL / "data.csv")
    for row in rows:
        if row["policy"]:
            name = re.sub(r"^.*?-|\.npz| 0\.0$", "", row["policy"])
            behaviours[row["dataset"]].append(f"{name} {float(row['score']):.1f}")
    for row in rows:
        if not row["policy"]:
            score = f"{float(row['score']):.1f} ± {float(row['deviation']):.1f}"
            sizes = [row["episodes"], thousands(row["transitions"])]
            name = row["dataset"]
            numbers = [*sizes, score, f"{float(row['best']):.1f}"]
            lines.append([f"`{name}`", "; ".join(behaviours[name]), *numbers])
    heads = ["set", "behaviour: policy, noise, mean score", "episodes", "transitions"]
    return markdown([*heads, "score, mean ± deviation", "best"], lines, words=2)


@table
def action_time() -> str:
    """Milliseconds of an action by model, mode and step."""
    rows = {(row["model"], row["mode"]): row for row in rows_of(D4RL / "action_time.csv")}
    steps = ("step_20_ms", "step_100_ms", "step_300_ms", "step_999_ms")
    lines = []
    for model in dict.fromkeys(model for model, _ in rows):
        cells = [rows[model, "window"][steps[-1]], *(rows[model, "state"][step] for step in steps)]
        lines.append([f"`{model}`", *(f"{float(cell):.1f}" for cell in cells)])
    heads = ["model", "window, step 999", "state, step 20", "step 100", "step 300", "step 999"]
    return markdown(heads, lines)


# Accuracy


class Task(NamedTuple):
    """One line of the table of accuracies."""

    name: str
    folder: str
    sets: tuple[str, ...]
    unit: str
    remark: str


MODELS = {
    "softmax": "softmax",
    "linear": "linear",
    "primalformer": "Primal, all layers",
    "primal_plus": "Primal, last layer",
}
UEA = ("JapaneseVowels", "UWaveGestureLibrary", "Handwriting")
UEA += ("SelfRegulationSCP1", "SelfRegulationSCP2")
TASKS = [
    Task("five sets of time series", "table1_uea", UEA, "accuracy", "5 seeds"),
    Task("long text, 4,000 bytes", "table2_lra", ("text",), "accuracy", "1 seed"),
    Task("images as 1,024 pixels", "table2_lra", ("image",), "accuracy", "1 seed"),
    Task(
        "Tiny-ImageNet, 100 classes", "table5_images", ("tiny-imagenet-100",), "accuracy", "1 seed"
    ),
    Task("WikiText-2", "language", ("wikitext-2",), "perplexity", "1 seed"),
]


def cell(task: Task, model: str) -> str:
    """The mean of the rows of the clean protocol, empty where a set has none."""
    found = defaultdict(list)
    for row in rows_of(STUDIES / task.folder / "results.csv"):
        if (row["model"], row["protocol"], row["metric"]) == (model, "clean", task.unit):
            found[row["dataset"]].append(float(row["value"]))
    if not all(found[name] for name in task.sets):
        return ""
    return f"{fmean(fmean(found[name]) for name in task.sets):.1f}"


@table
def accuracy() -> str:
    """The mean over the seeds of each set, and over the sets; rows of other protocols are out."""
    heads = ["clean protocol", "metric", "seeds", *MODELS.values()]
    lines = [
        [task.name, task.unit, task.remark.split()[0], *(cell(task, model) for model in MODELS)]
        for task in TASKS
    ]
    return markdown(heads, lines, words=2)


# Classifiers of time series

CLASSIFIERS = {
    "default": '`preset="default"`',
    "default_machine": 'its machine alone, `preset="fast"`',
    "default_network": "its network alone",
    "multirocket_hydra": "MultiRocket-Hydra",
    "minirocket": "MiniRocket",
}
OF_TABLE_1 = (*UEA, "SpokenArabicDigits")


@table
def classifiers() -> str:
    """Test accuracy of each set, means over the sets that all have, and time to fit."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows_of(STUDIES / "timeseries_classifiers/classifiers.csv"):
        if not row["settings"]:
            model = "default_machine" if row["model"] == "fast" else row["model"]  # the same one
            numbers = float(row["value"]), float(row["cpu_seconds"])
            found[row["dataset"]][model].append(numbers)
    means = {
        name: {model: [*map(fmean, zip(*each, strict=True))] for model, each in models.items()}
        for name, models in found.items()
    }
    lines = [
        [name, *(f"{each[model][0]:.1f}" if model in each else "" for model in CLASSIFIERS)]
        for name, each in sorted(means.items())
    ]
    complete = [name for name, each in means.items() if CLASSIFIERS.keys() <= each.keys()]
    of_table_1 = [name for name in complete if name in OF_TABLE_1]
    for head, names in (("mean of {} sets", complete), ("mean of {} of Table 1", of_table_1)):
        if names:
            cells = (fmean(means[name][model][0] for name in names) for model in CLASSIFIERS)
            lines.append([head.format(len(names)), *(f"{cell:.1f}" for cell in cells)])
    parts = {"default_machine", "default_network"}
    cells = (
        "" if model in parts else f"{sum(means[name][model][1] for name in complete):.0f}"
        for model in CLASSIFIERS
    )
    lines.append([f"seconds of a core to fit {len(complete)}", *cells])
    return markdown(["test accuracy (%)", *CLASSIFIERS.values()], lines)


# Raw sound


def percent(rows: Iterable[dict[str, str]]) -> str:
    """The mean of some rows; empty where there is none."""
    found = [float(row["value"]) for row in rows]
    return f"{fmean(found):.1f} ({len(found)})" if found else ""


@table
def raw_sound() -> str:
    """Accuracy by model and epochs, of clips of known and of unknown speakers."""
    found = defaultdict(list)
    for row in rows_of(STUDIES / "audio/results.csv"):
        epochs = re.search(r"(?<!\S)epochs=(\d+)", row["settings"])
        found[row["model"], epochs[1] if epochs else "100"].append(row)
    heads = ["model", "epochs", "spoken digits", "a speaker held out", "ESC-50"]
    lines = []
    for (model, epochs), rows in found.items():
        parts = [
            [row for row in rows if row["dataset"] == "digits"],
            [row for row in rows if row["dataset"].startswith("digits-")],
            [row for row in rows if row["dataset"].startswith("esc50")],
        ]
        lines.append([f"`{model}`", epochs, *map(percent, parts)])
    return markdown(heads, lines)


@table
def raw_sound_steps() -> str:
    """Cost of a training step on a clip of ESC-50."""
    heads = ["model", "parameters", "CPU seconds", "peak MiB"]
    columns = ("parameters", "cpu_seconds", "peak_mib")
    rows = rows_of(STUDIES / "audio/steps.csv")
    return markdown(
        heads, [[f"`{row['model']}`", *(row[each] for each in columns)] for row in rows]
    )


# Calibration


@table
def calibration() -> str:
    """Measures of probabilities on test cases, mean over the seeds; ECE with its deviation."""
    names = {
        ("softmax", False): "softmax attention",
        ("primal_plus", False): "Primal, last layer",
        ("primal_plus", True): "KEP-SVGP, last layer",
    }
    found = defaultdict(list)
    for row in rows_of(STUDIES / "uncertainty/calibration.csv"):
        uncertain = "uncertainty=true" in row["settings"]
        if (row["draws"] == "0") != uncertain:
            found[row["dataset"], row["model"], uncertain, row["scaled"]].append(row)
    lines = []
    for name in dict.fromkeys(key[0] for key in found):
        for (model, uncertain), text in names.items():
            for scaled, more in (("no", ""), ("yes", ", temperature")):
                rows = found[name, model, uncertain, scaled]
                numbers = {key: [float(row[key]) for row in rows] for key in MEASURES}
                ece = [100 * each for each in numbers["ece"]]
                means = [f"{fmean(numbers[key]):.3f}" for key in MEASURES[2:]]
                cells = [
                    f"{fmean(numbers['accuracy']):.1f}",
                    f"{fmean(ece):.1f} ± {stdev(ece):.1f}",
                ]
                lines.append([name, text + more, *cells, *means])
    heads = ["set", "probabilities", "accuracy", "ECE (%)", "NLL", "Brier", "AURC"]
    return markdown(heads, lines, words=2)


MEASURES = ("accuracy", "ece", "nll", "brier", "aurc")


def main() -> None:
    for page in pages():
        text = page.read_text()
        made = filled(text)
        if made != text:
            page.write_text(made)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
