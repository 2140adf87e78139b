"""Write docs/mechanisms.md from the registry and the measured errors.

    python docs/make_mechanisms.py

A test fails where the page is not what this program writes.
"""

import csv
from pathlib import Path

from primal_attention import ATTENTIONS

DOCS = Path(__file__).parent
ERRORS = DOCS.parent / "benchmarks/results/precision.csv"

INTRODUCTION = """\
# Mechanisms

Every mechanism is built by `build_attention(name, dim, num_heads, **options)`, has the signature
`forward(x, context=None, *, token_mask=None, context_mask=None)`, and is held to the
[contract](contract.md): `primal check NAME` prints its report, `primal check` the table of all.

[Which one to take](choosing.md#the-other-mechanisms) is a page of its own. This one is written by
`python docs/make_mechanisms.py` from the registry.

"""

PRECISION = """
## Precision

Relative error |a - b| / |b| against float64: outputs, and gradients of the input, of one layer
(4 sequences of up to 512 tokens with padding, 128 channels, 4 heads), largest over the causal and
the bidirectional form. `python benchmarks/precision.py` measures it again;
`benchmarks/results/precision.csv` has all rows, from one H200 but for those of `primal_time`, which
are from a CPU. Those of `nystrom`,
`linformer` and `performer` are older than the way these are computed now.

Three mechanisms are ill-conditioned by themselves: Reformer's hashes put some tokens in other
buckets once they are rounded, the kink of cosFormer's relu moves gradients, and Attention-BN
divides by the variance of few keys at the start of a causal sequence (`eps=1e-3` is milder there).

"""


def yes(value: bool) -> str:
    return "yes" if value else "-"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def mechanisms() -> str:
    rows = []
    for name, kind in ATTENTIONS.items():
        about = kind.mechanism
        complexity = f"`{about.complexity}`"
        causal, cross = yes(about.causal), yes(about.cross)
        row = [f"`{name}`", about.paper, complexity, causal, cross, "yes"]
        rows.append([*row, about.decode or "-", about.fused or "-"])
    header = ["mechanism", "paper", "time", "causal", "cross", "mask", "decode state", "fused path"]
    return table(header, rows)


def precision() -> str:
    with ERRORS.open(newline="") as file:
        measured = list(csv.DictReader(file))
    rows = []
    for name in ATTENTIONS:
        row = [f"`{name}`"]
        for dtype in ("float32", "bfloat16", "float16"):
            mine = [m for m in measured if m["mechanism"] == name and m["dtype"] == dtype]
            for column in ("output", "input_grad"):
                row.append(f"{max(float(m[column]) for m in mine):.1e}")
        rows.append(row)
    header = [f"{dtype} {what}" for dtype in ("fp32", "bf16", "fp16") for what in ("out", "grad")]
    return table(["mechanism", *header], rows)


def page() -> str:
    return INTRODUCTION + mechanisms() + PRECISION + precision()


if __name__ == "__main__":
    (DOCS / "mechanisms.md").write_text(page())
