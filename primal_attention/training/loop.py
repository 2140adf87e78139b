"""The training loop.

A run is a sequence of rounds: some epochs of steps, an evaluation, a look at whether it is the best
so far. Everything random in a round follows from the seed and the number of the round, so a run
that was killed and resumed at the end of its last saved round goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from primal_attention.objectives import ksvd_loss, record_ksvd
from primal_attention.tasks import Batch, Task
from primal_attention.training.building import build_model, build_optimizer, uses_objective
from primal_attention.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from primal_attention.training.devices import mean_over_processes
from primal_attention.training.evaluation import Evaluation, evaluate
from primal_attention.training.order import Plan
from primal_attention.training.recipe import Recipe
from primal_attention.training.schedules import lr_factor
from primal_attention.training.weights import (
    gather_model,
    gather_optimizer,
    load_model,
    load_optimizer,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric

LAST, BEST = "last.safetensors", "best.safetensors"


class Watcher:
    """Is told how a run goes; this one says nothing."""

    def start(self, recipe: Recipe, plan: Plan, done: list[dict[str, float]]) -> None:
        """The run begins, or goes on after the rounds already done."""

    def step(self, step: int) -> None:
        """A step was made."""

    def round(self, entry: dict[str, float]) -> None:
        """A round is over."""

    def stop(self) -> None:
        """The run is over, or was interrupted."""


@dataclass
class Progress:
    """How far a run is; what a checkpoint holds beside tensors."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    best: int = -1  # index of the best round
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    recipe: Recipe
    metric: str
    value: float  # of the test cases, with the weights of the best round
    valid: float  # of the cases that chose this round
    rounds: list[dict[str, float]]
    best: int
    steps: int
    seconds: float
    device: str
    weights: dict[str, Tensor]  # of the best round, on the CPU


def train(
    recipe: Recipe,
    task: Task,
    fabric: Fabric,
    *,
    directory: Path | None = None,
    watcher: Watcher | None = None,
    save_every: float = 30.0,
) -> Outcome:
    """Train a recipe on a task and measure the best round on the test cases, once.

    Args:
        recipe: What to train and how.
        task: The cases, loss and metric.
        fabric: From ``launch``.
        directory: Where checkpoints go; a run that was interrupted there is resumed.
        watcher: Is told how it goes.
        save_every: Least number of seconds between two checkpoints.
    """
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return Run(recipe, task, fabric, directory, watcher or Watcher(), save_every).run()


class Run:
    """One run: model, optimiser and progress, and the steps between them."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        fabric: Fabric,
        directory: Path | None,
        watcher: Watcher,
        save_every: float,
    ):
        self.recipe, self.fabric, self.watcher = recipe, fabric, watcher
        self.directory, self.save_every = directory, save_every
        self.task = task.to(fabric.device)
        self.plan = Plan(
            recipe.seed,
            len(task.train),
            recipe.batch_size,
            recipe.epochs,
            recipe.eval_every,
            fabric.world_size,
        )
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, task.sizes)
        self.with_objective = uses_objective(recipe, model)
        self.model: Any = fabric.setup(model)
        self.optimizer: Any = fabric.setup_optimizers(build_optimizer(recipe, self.model))
        self.progress = Progress()
        self.best_weights: dict[str, Tensor] = {}

    def run(self) -> Outcome:
        """All rounds that are left, then the test."""
        self._resume()
        self.watcher.start(self.recipe, self.plan, self.progress.rounds)
        try:
            saved = began = time.monotonic()
            while not self._over():
                self._round()
                now = time.monotonic()
                self.progress.seconds += now - began
                began = now
                if self._over() or now - saved >= self.save_every:
                    self._save()
                    saved = time.monotonic()
        finally:
            self.watcher.stop()
        return self._outcome()

    def _over(self) -> bool:
        rounds, patience = len(self.progress.rounds), self.recipe.patience
        waited = rounds - 1 - self.progress.best
        return rounds >= self.plan.num_rounds or (patience is not None and waited >= patience)

    def _round(self) -> None:
        index = len(self.progress.rounds)
        self.plan.reseed(index, self.fabric.global_rank)
        self.model.train()
        sums = torch.zeros(2, device=self.fabric.device)  # of the losses and of the objectives
        steps = 0
        for epoch in self.plan.epochs_of(index):
            for indices in self.plan.batches(epoch, self.fabric.device):
                step = epoch * self.plan.steps_per_epoch + steps % self.plan.steps_per_epoch
                sums += self._step(step, indices)
                steps += 1
                self.watcher.step(step)
        loss, objective = mean_over_processes(self.fabric, sums / steps).tolist()
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the training loss is {loss} in epoch {epoch + 1}; try a lower lr than "
                f"{self.recipe.lr}, a clip_norm, or precision=fp32"
            )
        found = evaluate(self.model, self.task.goal, self.task.valid, self.fabric)
        entry = {
            "epoch": epoch + 1,
            "step": (epoch + 1) * self.plan.steps_per_epoch,
            "train_loss": loss,
            "objective": objective,
            "valid_loss": found.loss,
            f"valid_{self.task.goal.metric}": found.value,
        }
        self.progress.rounds.append(entry)
        if self._is_best(found):
            self.progress.best = index
            self.best_weights = gather_model(self.model.module)
        self.watcher.round(entry)
        self.fabric.log_dict(entry, step=entry["step"])

    def _step(self, step: int, indices: Tensor) -> Tensor:
        """One step; returns task loss and objective, without waiting for the device."""
        recipe, total = self.recipe, self.plan.total_steps
        lr = recipe.lr * lr_factor(recipe.schedule, step, total, recipe.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mine = indices[self.fabric.global_rank :: self.fabric.world_size]
        share = len(mine) * self.fabric.world_size / len(indices)  # so that processes average
        recording: AbstractContextManager[None] = (
            record_ksvd(self.model) if self.with_objective else nullcontext()
        )
        with recording:
            batch = self.task.train[mine]
            loss = self._task_loss(batch)
        objective = loss.new_zeros(())
        if self.with_objective:
            objective = ksvd_loss(self.model, objective=recipe.objective)
        self.fabric.backward((loss + recipe.eta * objective) * share)
        if recipe.clip_norm is not None:
            self.fabric.clip_gradients(
                self.model,
                self.optimizer,
                max_norm=recipe.clip_norm,
                error_if_nonfinite=False,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss.detach(), objective.detach()]) * share

    def _task_loss(self, batch: Batch) -> Tensor:
        return self.task.goal.losses(self.model(**batch.inputs), batch.target).mean()

    def _is_best(self, found: Evaluation) -> bool:
        """A better metric, or the same with a lower loss."""
        if self.progress.best < 0:
            return True
        best = self.progress.rounds[self.progress.best]
        value = best[f"valid_{self.task.goal.metric}"]
        if found.value == value:
            return found.loss < best["valid_loss"]
        return (found.value > value) == self.task.goal.higher_is_better

    def _save(self) -> None:
        """All that a resumed run needs in one file, the best weights in another."""
        if self.directory is None:
            return
        model = gather_model(self.model.module)
        optimizer = gather_optimizer(self.optimizer.optimizer)
        if not self.fabric.is_global_zero:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = {"recipe": self.recipe.to_json(), "progress": asdict(self.progress)}
        parts = {"model": model, "optimizer": optimizer, "best": self.best_weights}
        tensors = {
            f"{part}.{name}": each for part, state in parts.items() for name, each in state.items()
        }
        write_checkpoint(self.directory / LAST, tensors, facts)
        best = self.progress.rounds[self.progress.best]
        facts = {"recipe": self.recipe.to_json(), "sizes": asdict(self.task.sizes), "round": best}
        write_checkpoint(self.directory / BEST, self.best_weights, facts)

    def _resume(self) -> None:
        """Go on after the last saved round, if there is one."""
        if self.directory is None or not (self.directory / LAST).exists():
            return
        checkpoint = read_checkpoint(self.directory / LAST)
        self._check_same_recipe(checkpoint)
        self.progress = Progress(**checkpoint.facts["progress"])
        self.best_weights = checkpoint.part("best")
        load_model(self.model.module, checkpoint.part("model"))
        load_optimizer(self.optimizer.optimizer, checkpoint.part("optimizer"))

    def _check_same_recipe(self, checkpoint: Checkpoint) -> None:
        before = Recipe.from_json(checkpoint.facts["recipe"])
        if before == self.recipe:
            return
        theirs, ours = asdict(before), asdict(self.recipe)
        changed = [f"{key}={theirs[key]!r}" for key in ours if theirs[key] != ours[key]]
        raise ValueError(
            f"{self.directory} holds a run of another recipe ({', '.join(changed)}); "
            "choose another directory or remove it"
        )

    def _outcome(self) -> Outcome:
        load_model(self.model.module, self.best_weights)
        test = evaluate(self.model, self.task.goal, self.task.test, self.fabric)
        best = self.progress.rounds[self.progress.best]
        return Outcome(
            self.recipe,
            self.task.goal.metric,
            test.value,
            best[f"valid_{self.task.goal.metric}"],
            self.progress.rounds,
            self.progress.best,
            int(self.progress.rounds[-1]["step"]),
            self.progress.seconds,
            device_name(self.fabric.device),
            self.best_weights,
        )


def device_name(device: torch.device) -> str:
    """The card, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
