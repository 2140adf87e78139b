"""Train PrimalFormer and a softmax Transformer on JapaneseVowels, and look at what they learnt.

270 utterances of nine speakers, 12 channels, 7 to 29 time steps: the data come with aeon, nothing
is downloaded. A fifth of the training cases chooses the epoch, the test cases are looked at once.

    python examples/japanese_vowels.py --out out/japanese_vowels.png

The table compares with the paper; the picture has the learning curves and the spectrum of the last
attention layer: how much of its kernel the leading singular directions hold.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from primal_attention import PrimalAttention
from primal_attention.ops.landmarks import landmarks
from primal_attention.tasks import Task
from primal_attention.tasks.uea import uea_task
from primal_attention.training import Outcome, build_model, find_recipe, launch, progress_bar, train

#   Label, the paper's accuracy (its Table 1: the best of all test epochs), colour.
MODELS = {
    "primalformer": ("PrimalFormer", 98.4, "tab:blue"),
    "softmax": ("softmax", 98.7, "tab:orange"),
}
SHOWN_TOKENS = 15  # spectra are of sequences with at least so many tokens


def main() -> None:
    arguments = parse_arguments()
    task = uea_task("JapaneseVowels", valid=0.2, seed=arguments.seed)
    fabric = launch(accelerator="cpu", devices=1)
    outcomes = {}
    for name in MODELS:
        recipe = find_recipe("uea/JapaneseVowels", name, "clean", arguments.seed)
        recipe = recipe.with_settings([f"epochs={arguments.epochs}", *arguments.set])
        outcomes[name] = train(recipe, task, fabric, watcher=progress_bar())
    print_table(outcomes)
    draw(outcomes, task, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/japanese_vowels.png"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes of the recipe")
    return parser.parse_args()


def print_table(outcomes: dict[str, Outcome]) -> None:
    table = Table(title="JapaneseVowels, test accuracy (%)")
    for heading in ("model", "ours, one seed, clean", "paper, best test epoch", "seconds"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, outcome in outcomes.items():
        label, paper, _ = MODELS[name]
        table.add_row(label, f"{outcome.value:.1f}", f"{paper}", f"{outcome.seconds:.0f}")
    Console().print(table)


def draw(outcomes: dict[str, Outcome], task: Task, path: Path) -> None:
    """Learning curves, and the share of the kernel's energy that the leading directions hold."""
    mpl.use("Agg")
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    losses, accuracies, spectra = figure.subplots(1, 3)
    for name, outcome in outcomes.items():
        label, _, colour = MODELS[name]
        epochs = [entry["epoch"] for entry in outcome.rounds]
        style = {"color": colour, "label": label}
        losses.plot(epochs, [entry["train_loss"] for entry in outcome.rounds], **style)
        accuracies.plot(epochs, [entry["valid_accuracy"] for entry in outcome.rounds], **style)
        energy = cumulative_energy(outcome, task)
        spectra.plot(range(1, len(energy) + 1), energy, marker=".", **style)
    label_axes(losses, "training loss", "epoch", log=True)
    label_axes(accuracies, "validation accuracy (%)", "epoch")
    label_axes(spectra, "energy of the last layer's kernel", "leading singular directions")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        figure.savefig(whole, dpi=150)
        whole.replace(path)
    print(f"the picture is {path}")


def label_axes(axes: Axes, title: str, below: str, *, log: bool = False) -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.set_yscale("log" if log else "linear")
    axes.grid(alpha=0.3)
    axes.legend()


@torch.no_grad()
def cumulative_energy(outcome: Outcome, task: Task) -> list[float]:
    """The share of |K|^2 in the first singular values, mean over test cases and heads."""
    model = build_model(outcome.recipe, task.sizes).eval()
    model.load_state_dict(outcome.weights)
    attention = [each for each in model.modules() if hasattr(each, "q_proj")][-1]
    seen: list[Tensor] = []
    attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    mask = task.test.inputs["token_mask"]
    long = mask.sum(1) >= SHOWN_TOKENS
    model(task.test.inputs["x"][long], token_mask=mask[long])
    squares = torch.stack(
        [
            torch.linalg.svdvals(kernel(attention, x[real])).square()[:, :SHOWN_TOKENS]
            for x, real in zip(seen[0], mask[long], strict=True)
        ]
    )
    shares = squares.cumsum(-1) / squares.sum(-1, keepdim=True)
    return [float(share) for share in shares.mean((0, 1))]


def kernel(attention: nn.Module, x: Tensor) -> Tensor:
    """The kernel matrix of each head over the tokens x [N, D], [H, N, N]."""
    q, k = (split(project(x), attention) for project in (attention.q_proj, attention.k_proj))
    if not isinstance(attention, PrimalAttention):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    x_sampled = split(landmarks(x[None], attention.num_landmarks)[0], attention)
    return F.normalize(q, dim=-1) @ x_sampled.mT @ x_sampled @ F.normalize(k, dim=-1).mT


def split(z: Tensor, attention: nn.Module) -> Tensor:
    return rearrange(z, "n (h c) -> h n c", h=attention.num_heads)


if __name__ == "__main__":
    main()
