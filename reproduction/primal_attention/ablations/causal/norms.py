"""Measure how large the output of an attention layer is, beside what it is added to.

    python reproduction/primal_attention/ablations/causal/norms.py

Of the last layer as it starts, before any training: in the classifiers of this study on the test
cases of JapaneseVowels, and in the Decision Transformer of Table 4 on drawn trajectories. norms.csv
has, as means over the tokens, the norm of the residual stream before the layer, that of the layer's
output, and that of its output less the mean over all tokens: the part that depends on the token.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from recipes import SEEDS, directions, recipes
from torch import Tensor, nn

from primal_attention.atomic_files import write_rows
from primal_attention.tasks import Sizes
from primal_attention.training import Recipe, build_model, find_recipe, task_of
from primal_attention.training.results import current_commit, key_of

HERE = Path(__file__).parent
SERIES, DECISIONS = "uea/JapaneseVowels", "rl/hopper-medium"
EPISODES, STEPS, STATES, ACTIONS = 64, 20, 11, 3  # a state of Hopper is 11 numbers, an action 3
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for norms.csv")
    arguments = parser.parse_args()
    rows = []
    for recipe in (*series_recipes(), *decision_recipes()):
        rows.append(measured(recipe.with_settings(arguments.set)))
        print(*rows[-1].values(), flush=True)
    write_rows(arguments.out / "norms.csv", rows)


def series_recipes() -> Iterator[Recipe]:
    yield from (recipe for recipe in recipes() if recipe.task == SERIES)


def decision_recipes() -> Iterator[Recipe]:
    """List the recipes of Table 4, and Primal.+ with dual weights."""
    for seed in range(SEEDS):
        for model in ("softmax", "linear", "flow", "primal_plus"):
            recipe = find_recipe(DECISIONS, model, "clean", seed)
            yield recipe
        yield recipe.replace(attention=directions(recipe, "dual"))


@torch.no_grad()
def measured(recipe: Recipe) -> Row:
    """The norms in the network of a recipe, as its seed starts it."""
    sizes, inputs = series() if recipe.task == SERIES else trajectories()
    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe, sizes).eval()
    residual, output = last_layer(model, inputs)
    kept = inputs["token_mask"] if recipe.task == SERIES else slice(None)
    dim = recipe.model.dim
    residual, output = residual[kept].reshape(-1, dim), output[kept].reshape(-1, dim)
    return {
        **key_of(recipe),
        "residual": norm(residual),
        "output": norm(output),
        "varying": norm(output - output.mean(0)),
        "device": "cpu",
        "torch": torch.__version__,
        "commit": current_commit(),
    }


def series() -> tuple[Sizes, dict[str, Tensor]]:
    task = task_of(find_recipe(SERIES, "softmax", "clean"))
    chosen = torch.linspace(0, len(task.test) - 1, EPISODES).long()
    return task.sizes, dict(task.test[chosen].inputs)


def trajectories() -> tuple[Sizes, dict[str, Tensor]]:
    """Standardised states, actions in (-1, 1) and falling returns, all drawn."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randn(EPISODES, STEPS, size, generator=generator)

    timesteps = torch.arange(STEPS).expand(EPISODES, STEPS)
    inputs = {"states": drawn(STATES), "actions": drawn(ACTIONS).tanh()}
    inputs["returns_to_go"] = 2 + drawn(1).abs().flip(1).cumsum(1).flip(1) / STEPS
    return Sizes(3 * STEPS, ACTIONS, num_channels=STATES), inputs | {"timesteps": timesteps}


def last_layer(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Record the input of the last block and the output of its attention, [B, N, D] each."""
    if hasattr(model, "host"):
        block = model.host.encoder.h[-1]
        attention = block.attn
    else:
        block = model.tower.encoder.blocks[-1]
        attention = block.attention
    heard: dict[nn.Module, Tensor] = {}
    block.register_forward_pre_hook(lambda module, args: heard.update({block: args[0]}))
    attention.register_forward_hook(lambda module, args, out: heard.update({attention: out}))
    model(**inputs)
    out = heard[attention]
    return heard[block], out[0] if isinstance(out, tuple) else out


def norm(x: Tensor) -> str:
    """The mean over tokens of the norms of x [T, D]."""
    return f"{float(x.norm(dim=-1).mean()):.4f}"


if __name__ == "__main__":
    main()
