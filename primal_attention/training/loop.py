"""The training loop.

A run is a sequence of rounds: some epochs of steps, an evaluation, a look at whether it is the best
so far. Everything random in a round follows from the seed and the number of the round, so a run
that was killed and resumed at the end of its last saved round goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.atomic_files import fitting, remove_unfinished, write_rows
from primal_attention.distributed import shard_context
from primal_attention.state_dicts import check_fit
from primal_attention.tasks import Cases, Task
from primal_attention.training import sharded_state
from primal_attention.training.batch_plan import BatchPlan, set_seed
from primal_attention.training.checkpoint import (
    BEST,
    LAST,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from primal_attention.training.devices import (
    check_precision,
    device_name,
    from_first,
    mean_over_processes,
    with_peers,
)
from primal_attention.training.evaluation import Evaluation, evaluate
from primal_attention.training.model_factory import build_model
from primal_attention.training.optimizers import build_optimizer
from primal_attention.training.outcome import Entry, Outcome, OutOfTimeError, Progress
from primal_attention.training.recipe import Recipe
from primal_attention.training.schedules import lr_factor
from primal_attention.training.step import Step, can_replay
from primal_attention.training.watchers import Watcher

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

METRICS, REFIT = "metrics.csv", "refit"


class Saving(NamedTuple):
    """When a run is saved: every so many seconds, and when its time is over."""

    every: float = 30.0
    until: float = math.inf


def train(
    recipe: Recipe,
    task: Task,
    fabric: Fabric,
    *,
    watcher: Watcher | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """Train a recipe on a task and measure the best round on the test cases, once.

    Nothing is written: ``train_in`` keeps a run in a directory.

    Args:
        recipe: What to train and how.
        task: The cases, loss and metric.
        fabric: From ``launch``.
        watcher: Is told how it goes.
        weights: The model starts from these in place of random ones.

    Raises:
        LostPeerError: One of the processes that train together is gone.
    """
    with with_peers(fabric):
        return train_alone(recipe, task, fabric, None, watcher, Saving(), weights=weights)


def train_alone(
    recipe: Recipe,
    task: Task,
    fabric: Fabric,
    directory: Path | None,
    watcher: Watcher | None,
    saving: Saving,
    context: DeviceMesh | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """Train, with checkpoints in a directory that no other run writes to."""
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        run = Run(recipe, task, fabric, directory, watcher or Watcher(), saving, context)
        if weights is not None:
            sharded_state.load_model(run.model.module, weights)
        run.run()
        return run.outcome(run.refitted() if recipe.run.refit else run)


class Run:
    """One run: model, optimiser and progress, and the steps between them."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        fabric: Fabric,
        directory: Path | None,
        watcher: Watcher,
        saving: Saving,
        context: DeviceMesh | None = None,
    ):
        check_precision(fabric, recipe.run.precision)
        _check_cases(task)
        self.recipe, self.fabric = recipe, fabric
        self.watcher = watcher if fabric.is_global_zero else Watcher()
        self.directory, self.saving, self.context = directory, saving, context
        self.task = task.to(fabric.device)
        self.plan = BatchPlan.of(recipe, len(task.train))
        set_seed(recipe.run.seed, fabric.device)
        model = build_model(recipe, task.sizes)
        if context is not None:  # gradients are averaged over all processes anyway
            shard_context(model, context, average_gradients=False)
        if recipe.run.compile:
            torch.compiler.reset()  # models of before count against the limit of recompilations
            model.compile(dynamic=False)
        self.model: Any = fabric.setup(model)
        optimizer = build_optimizer(recipe, self.model, capturable=can_replay(recipe, fabric))
        self.optimizer: Any = fabric.setup_optimizers(optimizer)
        self.step = Step(recipe, self.task, fabric, self.model, self.optimizer)
        self.progress = Progress()
        self.best_weights: dict[str, Tensor] = {}

    def run(self) -> None:
        """Run all rounds that are left."""
        self._resume()
        self._write_metrics()
        self.watcher.start(self.recipe, self.plan, self.progress)
        try:
            saved = began = time.monotonic()
            while not self._over():
                self._round()
                now = time.monotonic()
                self.progress.seconds += now - began
                began = now
                late = self.fabric.broadcast(time.time() >= self.saving.until)
                if self._over() or late or now - saved >= self.saving.every:
                    self._save()
                    saved = time.monotonic()
                if late and not self._over():
                    raise OutOfTimeError(f"the time is over after step {self.progress.steps}")
        finally:
            self.watcher.stop()

    def refitted(self) -> Run:
        """Train anew as long as the best round of this run, on the validation cases too."""
        recipe = _as_long_as(self.progress.rounds[self.progress.best], self.recipe)
        task = replace(self.task, train=self.task.train.joined(self.task.valid))
        directory = self.directory and self.directory / REFIT
        run = Run(recipe, task, self.fabric, directory, self.watcher, self.saving, self.context)
        run.run()
        return run

    def _over(self) -> bool:
        rounds, patience = len(self.progress.rounds), self.recipe.run.patience
        waited = rounds - 1 - self.progress.best
        return rounds >= self.plan.num_rounds or (patience is not None and waited >= patience)

    def _round(self) -> None:
        optim, index = self.recipe.optim, len(self.progress.rounds)
        self.plan.reseed(index, self.fabric.global_rank, self.fabric.device)
        self.model.train()
        sums = torch.zeros(2, device=self.fabric.device)  # of the losses and of the objectives
        steps = self.plan.steps_of(index)
        batches = self.plan.batches_of(index, self.fabric.device)
        for step, indices in zip(steps, batches, strict=True):
            factor = lr_factor(optim.schedule, step, self.plan.total_steps, optim.warmup)
            sums += self.step(indices, optim.lr * factor)
            self.watcher.step(step)
        loss, objective = mean_over_processes(self.fabric, sums / len(steps)).tolist()
        epoch = self.plan.epochs_after(steps.stop)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the training loss is {loss} in epoch {epoch}; try a lower lr than "
                f"{optim.lr}, a clip_norm, or precision=fp32"
            )
        found = self._evaluate(self.task.valid)
        entry = {
            "epoch": epoch,
            "step": steps.stop,
            "train_loss": loss,
            "objective": objective,
            "valid_loss": found.loss,
            f"valid_{self.task.goal.metric}": found.value,
        }
        self.progress.rounds.append(entry)
        if self._is_best(found):
            self.progress.best = index
            self.best_weights = sharded_state.gather_model(self.model.module)
        self._write_metrics()
        self.watcher.round(entry)
        self.fabric.log_dict(entry, step=int(entry["step"]))

    def _evaluate(self, cases: Cases) -> Evaluation:
        as_written = torch.compiler.set_stance("force_eager") if self.recipe.run.compile else None
        with as_written or nullcontext():
            return evaluate(self.model, self.task.goal, cases, self.fabric)

    def _is_best(self, found: Evaluation) -> bool:
        """Return whether the metric is better, or equal with a lower loss."""
        goal, best = self.task.goal, self.progress.rounds[self.progress.best]
        sign = 1 if goal.higher_is_better else -1
        ours, theirs = (found.value, found.loss), (best[f"valid_{goal.metric}"], best["valid_loss"])
        better = [(sign * value, -loss) for value, loss in (ours, theirs)]
        return self.progress.best < 0 or better[0] > better[1]

    def _write_metrics(self) -> None:
        """Write exactly the rounds that are done; those of a killed run that were not saved go."""
        if self.directory is not None and self.fabric.is_global_zero:
            path = self.directory / METRICS
            if self.progress.rounds:
                write_rows(path, self.progress.rounds)
            else:
                path.unlink(missing_ok=True)

    def _save(self) -> None:
        """Write all that a resumed run needs to one file, the best weights to another."""
        directory = self.directory
        if directory is None:
            return
        state = {
            "model": sharded_state.gather_model(self.model.module),
            "optimizer": sharded_state.gather_optimizer(self.optimizer.optimizer),
            "best": self.best_weights,
        }
        tensors = {f"{part}.{name}": each for part in state for name, each in state[part].items()}
        facts = {
            "recipe": self.recipe.to_json(),
            "progress": asdict(self.progress),
            "precision": self.fabric.strategy.precision.state_dict(),  # fp16: the loss's scale
        }

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            write_checkpoint(directory / LAST, tensors, facts)
            self._save_best(directory)

        from_first(self.fabric, write)

    def _save_best(self, directory: Path) -> None:
        """Write the weights of the best round, and what it takes to use them."""
        task = self.task
        facts = {
            "recipe": self.recipe.to_json(),
            "sizes": asdict(task.sizes),
            "labels": task.labels,
            "encoding": task.encoding.to_dict() if task.encoding else None,
            "round": self.progress.rounds[self.progress.best],
        }
        write_checkpoint(directory / BEST, self.best_weights, facts)

    def _resume(self) -> None:
        """Go on after the last saved round, if there is one; the first process reads for all."""
        checkpoint = from_first(self.fabric, self._saved)
        if checkpoint is None:
            return
        self.progress = Progress(**checkpoint.facts["progress"])
        self.best_weights = checkpoint.part("best")
        sharded_state.load_model(self.model.module, checkpoint.part("model"))
        sharded_state.load_optimizer(self.optimizer.optimizer, checkpoint.part("optimizer"))
        if checkpoint.facts["precision"]:
            self.fabric.strategy.precision.load_state_dict(checkpoint.facts["precision"])
        if self.directory is not None and self.fabric.is_global_zero:
            self._save_best(self.directory)  # a kill may have come between the two files

    def _saved(self) -> Checkpoint | None:
        if self.directory is None:
            return None
        remove_unfinished(self.directory)
        if not (self.directory / LAST).exists():
            return None
        path = self.directory / LAST
        checkpoint = read_checkpoint(path)
        with fitting(path, "a checkpoint of this run"):
            found = Recipe.from_json(checkpoint.facts["recipe"])
            checkpoint.facts["precision"]
            Progress(**checkpoint.facts["progress"]).check()
        self.recipe.check_same(found, self.directory)
        with fitting(path, "a checkpoint of this run"):
            check_fit(self.model.module, checkpoint.part("model"))
            if checkpoint.part("best"):
                check_fit(self.model.module, checkpoint.part("best"))
            sharded_state.check_optimizer(self.optimizer.optimizer, checkpoint.part("optimizer"))
        return checkpoint

    def outcome(self, last: Run) -> Outcome:
        """Test once, with the weights of the last run, and return the outcome."""
        self.best_weights = last.best_weights
        if last is not self and self.directory is not None and self.fabric.is_global_zero:
            self._save_best(self.directory)
        sharded_state.load_model(self.model.module, self.best_weights)
        test = self._evaluate(self.task.test)
        runs = [self] if last is self else [self, last]
        best = self.progress.rounds[self.progress.best]
        return Outcome(
            self.recipe,
            self.task.goal.metric,
            test.value,
            best[f"valid_{self.task.goal.metric}"],
            self.progress.rounds,
            self.progress.best,
            sum(int(run.progress.rounds[-1]["step"]) for run in runs),
            sum(run.progress.seconds for run in runs),
            device_name(self.fabric.device),
            self.best_weights,
        )


def _as_long_as(entry: Entry, recipe: Recipe) -> Recipe:
    """Return the recipe of a run that ends where that round did, evaluated only there."""
    unit = recipe.optim.unit
    length = int(entry[unit])
    return recipe.replace(**{f"{unit}s": length}, eval_every=length, patience=None)


def _check_cases(task: Task) -> None:
    for name, cases in (("train", task.train), ("valid", task.valid), ("test", task.test)):
        if not len(cases):
            raise ValueError(f"the task {task.name} has no case in {name}")
