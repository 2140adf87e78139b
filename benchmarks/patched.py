"""Tokens a second and memory of transformers before and after patching, by length.

    python benchmarks/patched.py --out benchmarks/results --seconds 60

Bodies of known sizes with random weights: all but the embeddings of words and the head, which no
patch touches. Before: the attention of PyTorch (sdpa). After: Primal in the last layer, or in all.
A pass forward in evaluation, or forward and backward in training with the objective; dropout is
off, which suits sdpa. bfloat16 on a GPU, float32 on a CPU.

`tokens_per_s` counts the time of the call, `peak_mib` what a pass adds to the memory of the
parameters (on a GPU; nothing measures it on a CPU). The work of the GPU alone is not measured:
transformers makes a mask of all tokens where a CUDA graph is recorded, and none otherwise. A row of
the file that is measured again is replaced.
"""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from primal_attention import ksvd_loss, patch
from primal_attention.atomic_files import write_text
from primal_attention.benchmarking.clocks import warm_up
from primal_attention.benchmarking.measurement import Measurement, measure
from primal_attention.benchmarking.plans import LEFT_OUT
from primal_attention.benchmarking.registry import Entry, LayerSizes
from primal_attention.benchmarking.results import card_name
from primal_attention.training.results import current_commit

Row = dict[str, str]
KEY = ("model", "patched", "weights", "tokens", "batch", "dtype", "pass")
COLUMNS = (
    *KEY,
    *("tokens_per_s", "against_unpatched", "wall_ms", "peak_mib"),
    *("device", "threads", "torch", "commit", "note"),
)
SHOWN = COLUMNS[: COLUMNS.index("device")]
DIRECTIONS = 32
PASSES = ("fwd+bwd", "fwd")


class Host(NamedTuple):
    """A transformer by its sizes."""

    layers: int
    dim: int
    heads: int
    causal: bool = False

    def body(self, max_tokens: int) -> Any:
        if self.causal:
            return GPT2Model(
                GPT2Config(
                    n_layer=self.layers,
                    n_embd=self.dim,
                    n_head=self.heads,
                    n_positions=max_tokens,
                    vocab_size=2,
                    bos_token_id=0,
                    eos_token_id=0,
                    use_cache=False,
                    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
                )
            )
        config = BertConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.dim,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.dim,
            max_position_embeddings=max_tokens,
            vocab_size=2,
            **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
        )
        return BertModel(config, add_pooling_layer=False)


HOSTS = {
    "bert-base": Host(12, 768, 12),
    "gpt2": Host(12, 768, 12, causal=True),
    "minilm": Host(6, 384, 12),
    "distilgpt2": Host(6, 768, 12, causal=True),
}


class Form(NamedTuple):
    """Layers that are patched, and their weights."""

    patched: str
    weights: str = ""


UNPATCHED = Form("none")


def forms(host: Host) -> tuple[Form, ...]:
    """The least that there is to know comes first; dual weights, which cost more, come last."""
    plain = "static" if host.causal else "sampled"
    return UNPATCHED, Form("last", plain), Form("all", plain), Form("all", "dual")


class Body(nn.Module):
    """Outputs of a model, and in training the objective of its patched layers."""

    def __init__(self, model: Any, form: Form):
        super().__init__()
        self.patched = form != UNPATCHED
        if self.patched:
            layers = -1 if form.patched == "last" else "all"
            options = {"weights": form.weights, "num_directions": DIRECTIONS}
            patch(model, "primal", layers=layers, **options)
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.model(inputs_embeds=x).last_hidden_state
        return (y, ksvd_loss(self.model)) if self.patched and self.training else (y,)


class Job(NamedTuple):
    """One measurement to be made."""

    name: str
    form: Form
    tokens: int
    batch: int
    kind: str

    def measure(self, device: torch.device) -> Measurement:
        host = HOSTS[self.name]

        def build(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
            with x.device:  # random weights are quickly drawn there
                return Body(host.body(sizes.n), self.form)

        sizes = LayerSizes(
            self.tokens, self.batch, host.dim, host.heads, DIRECTIONS, dtype_of(device)
        )
        return measure(Entry(self.name, build), sizes, self.kind, device, replayed=False)

    def row(self, device: torch.device) -> Row:
        """Fill the cells that are known before anything is measured."""
        return {
            "model": self.name,
            "patched": self.form.patched,
            "weights": self.form.weights,
            "tokens": str(self.tokens),
            "batch": str(self.batch),
            "dtype": dtype_of(device),
            "pass": self.kind,
            "device": card_name(device),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__.split("+")[0],
            "commit": current_commit(),
        }


def dtype_of(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def jobs(names: Sequence[str], lengths: Sequence[int], total: int) -> Iterator[Job]:
    """The most wanted first: what each length gains in training, and dual weights at the end."""
    for last in (False, True):
        for kind, name, n in product(PASSES, names, lengths):
            for form in forms(HOSTS[name]):
                if (form.weights == "dual") is last:
                    yield Job(name, form, n, max(total // n, 1), kind)


def measured(job: Job, made: Measurement, before: Sequence[Row], device: torch.device) -> Row:
    """A row; those before it have the model unpatched."""
    row = job.row(device) | {"note": made.note}
    cells = {"wall_ms": made.wall_ms, "peak_mib": made.peak_mib}
    row |= {name: "" if value is None else f"{value:.4g}" for name, value in cells.items()}
    if made.wall_ms is not None:
        row["tokens_per_s"] = f"{1e3 * job.tokens * job.batch / made.wall_ms:.0f}"
        row["against_unpatched"] = against(row, before)
    return row


def against(row: Row, before: Sequence[Row]) -> str:
    """Tokens a second over those of the unpatched model; nothing where it has none."""
    same = row | UNPATCHED._asdict()
    for other in (*before, row):
        if key_of(other) == key_of(same) and other.get("tokens_per_s"):
            return f"{int(row['tokens_per_s']) / int(other['tokens_per_s']):.3f}"
    return ""


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, kept: Sequence[Row], rows: Sequence[Row]) -> None:
    """Write all rows in one step; new measurements overwrite the kept rows."""
    again = {key_of(row) for row in rows}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*(row for row in kept if key_of(row) not in again), *rows])
    write_text(path, text.getvalue())


def show(row: Row) -> None:
    widths = {name: max(len(name), 9) for name in SHOWN}
    cells = " ".join(f"{row.get(name, ''):>{width}}" for name, width in widths.items())
    print(f"{cells}  {row.get('note', '')}".rstrip(), flush=True)


def main(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + arguments.seconds
    names = arguments.models or (["bert-base", "gpt2"] if device.type == "cuda" else ["minilm"])
    total = arguments.total or (32768 if device.type == "cuda" else 2048)
    path = None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        version = torch.__version__.split("+")[0]
        path = arguments.out / f"patched_{card_name(device)}_torch{version}.csv"
    kept, rows = read(path) if path else [], []
    warm_up(device)
    show({name: name for name in SHOWN})
    for job in jobs(names, arguments.tokens, total):
        on_time = time.monotonic() < end
        made = job.measure(device) if on_time else Measurement(note=LEFT_OUT)
        row = measured(job, made, rows, device)
        show(row)
        if on_time:
            rows.append(row)
            if path:
                write(path, kept, rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=HOSTS, help="bert-base and gpt2 on a GPU")
    parser.add_argument("--tokens", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--total", type=int, help="tokens in a batch, 32768 on a GPU, else 2048")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--out", type=Path, help="folder for the CSV file")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
