"""Train encoder-decoders whose decoders have cross-attention of one mechanism or another.

    python reproduction/cross.py --jobs 2

The decoder has one learnt vector a position and no self-attention, so that what it knows of the
source comes through cross-attention alone; the encoder has softmax attention, whatever the
mechanism. Two tasks. ``reverse``: sequences of 8 to 23 symbols out of 16, made up, to be written
backwards. ``forecast``: the 8 vectors that follow 32 of a spoken digit (SpokenArabicDigits).
"""

import argparse
import multiprocessing as mp
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import run
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.models import Embedding, Encoder, build_attentions
from primal_attention.models.encoder import EncoderBlock
from primal_attention.tasks import Cases, Goal, Sizes, Task, uea_task
from primal_attention.training import Domain, Recipe
from primal_attention.training.results import KEY, Row, add_rows, current_commit, key_of, read_rows

TABLE = "primal_attention/ablations/cross"
SYMBOLS, SHORTEST, LONGEST = 16, 8, 23
PAST, FUTURE = 32, 8
PADDING = -100


def main() -> None:
    arguments = parse_arguments()
    path = run.results_of(TABLE, arguments.out)
    left = list(missing(path, arguments))
    print(f"{len(left)} runs", flush=True)
    commit = current_commit()
    with ProcessPoolExecutor(arguments.jobs, mp.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_one, each, commit) for each in left]):
            add_rows(path, [future.result()])
            print(run.told(future.result()), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="folder for results.csv, default: here")
    parser.add_argument("--select", nargs="*", default=[], help="key=value,value of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    return parser.parse_args()


def missing(path: Path, arguments: argparse.Namespace) -> Iterator[Recipe]:
    """The recipes that are asked for and have no row yet."""
    done = [{name: row[name] for name in KEY} for row in read_rows(path)]
    for recipe in run.table_recipes(TABLE):
        changed = recipe.with_settings(arguments.set)
        if run.selected(recipe, arguments.select) and key_of(changed) not in done:
            yield changed


def run_one(recipe: Recipe, commit: str) -> Row:
    """One run through the ordinary loop, in a process of its own."""
    import logging

    from primal_attention.training import DOMAINS, launch, task_of, train
    from primal_attention.training.results import row_of

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    DOMAINS["cross"] = CROSS
    return row_of(train(recipe, task_of(recipe), launch(recipe.run.precision, devices=1)), commit)


class EncoderDecoder(nn.Module):
    """A source read by an encoder, and a vector for each position of the target that asks it."""

    def __init__(self, recipe: Recipe, sizes: Sizes, num_targets: int):
        super().__init__()
        model = recipe.model
        shape = model.num_layers, model.dim, model.num_heads
        self.embedding = Embedding(
            model.dim,
            sizes.num_tokens,
            num_channels=sizes.num_channels,
            vocab_size=sizes.vocab_size,
        )
        self.encoder = Encoder(build_attentions("softmax", *shape), model.dim, model.ffn_dim)
        self.queries = nn.Parameter(0.02 * torch.randn(num_targets, model.dim))
        self.blocks = nn.ModuleList(
            CrossBlock(attention, model.dim, model.ffn_dim)
            for attention in build_attentions(model.name, *shape, **model.attention)
        )
        self.head = nn.Linear(model.dim, sizes.num_outputs)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Outputs [B, targets, K]."""
        source = self.encoder(self.embedding(x), token_mask=token_mask)
        y = self.queries.expand(len(x), -1, -1)
        for block in self.blocks:
            y = block.ask(y, source, token_mask)
        outputs: Tensor = self.head(y)
        return outputs


class CrossBlock(EncoderBlock):
    """A block whose attention reads a source."""

    def ask(self, x: Tensor, source: Tensor, source_mask: Tensor | None) -> Tensor:
        """Outputs [B, N, D]."""
        mixed = self.attention(self.attention_norm(x), source, context_mask=source_mask)
        return self._add(x, mixed)


def build(recipe: Recipe, sizes: Sizes) -> nn.Module:
    return EncoderDecoder(recipe, sizes, LONGEST if sizes.vocab_size else FUTURE)


def reverse() -> Task:
    """Symbols to be written backwards; the classes of a position are the symbols."""
    generator = torch.Generator().manual_seed(0)
    train, valid, test = (reversed_cases(count, generator) for count in (8192, 512, 1024))
    sizes = Sizes(LONGEST, SYMBOLS, vocab_size=SYMBOLS)
    return Task("cross/reverse", TOKENS, sizes, train, valid, test)


def reversed_cases(count: int, generator: torch.Generator) -> Cases:
    x = torch.randint(SYMBOLS, (count, LONGEST), generator=generator)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    places = torch.arange(LONGEST)
    backwards = x.gather(1, (lengths - 1 - places).clamp(min=0))
    target = torch.where(places < lengths, backwards, PADDING)
    return Cases({"x": x, "token_mask": places < lengths}, target)


def forecast() -> Task:
    """Take what follows the first vectors of the spoken digits that are long enough."""
    digits = uea_task("SpokenArabicDigits", valid=0.2, seed=0)
    train, valid, test = (long_enough(each) for each in (digits.train, digits.valid, digits.test))
    channels = train.inputs["x"].shape[-1]
    sizes = Sizes(PAST, channels, num_channels=channels)
    return Task("cross/forecast", VECTORS, sizes, train, valid, test)


def long_enough(cases: Cases) -> Cases:
    kept = cases.inputs["token_mask"].sum(1) >= PAST + FUTURE
    x = cases.inputs["x"][kept]
    return Cases({"x": x[:, :PAST]}, x[:, PAST : PAST + FUTURE])


def token_losses(outputs: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs.mT, target, ignore_index=PADDING, reduction="none")
    return losses.sum(1) / (target != PADDING).sum(1)


def token_hits(outputs: Tensor, target: Tensor) -> Tensor:
    hits = (outputs.argmax(-1) == target).to(outputs.dtype)
    return hits.sum(1) / (target != PADDING).sum(1)


def squared_errors(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean((1, 2))


TOKENS = Goal(token_losses, token_hits, "accuracy", lambda mean: 100 * mean, higher_is_better=True)
VECTORS = Goal(squared_errors, squared_errors, "mse", lambda mean: mean, higher_is_better=False)
TASKS = {"reverse": reverse, "forecast": forecast}
CROSS = Domain(
    sets=tuple(TASKS),
    make_task=lambda recipe, folder: TASKS[recipe.set_name](),
    build_model=build,
)

if __name__ == "__main__":
    main()
