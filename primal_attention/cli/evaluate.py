"""`primal evaluate`: loss and metric of a checkpoint."""

import logging

from rich.console import Console

from primal_attention.cli import arguments
from primal_attention.tasks import Cases, Task
from primal_attention.training import finish, launch
from primal_attention.training.evaluation import Evaluation
from primal_attention.training.evaluation import evaluate as evaluate_cases
from primal_attention.training.model_factory import Trained, check_data, load_trained


def evaluate(
    checkpoint: arguments.Checkpoint,
    split: arguments.Split = "test",
    data: arguments.Data = None,
    accelerator: arguments.Accelerator = "auto",
) -> None:
    """Measure a trained model on the data it was trained for."""
    with arguments.naming("--split"):
        arguments.check_name("split", split, arguments.SPLITS)
    with arguments.naming("CHECKPOINT"):
        trained = load_trained(checkpoint)
    task = arguments.load_task(trained.recipe, data)
    with arguments.naming("--data"):
        check_data(trained.facts, task)
    cases: Cases = getattr(task, split)
    found = _evaluated(trained, task, cases, accelerator)
    recipe = trained.recipe
    Console(highlight=False, soft_wrap=True).print(
        f"{recipe.task}, {recipe.model.name}, {recipe.run.protocol} protocol, "
        f"seed {recipe.run.seed}: {split} {task.goal.metric} {found.value:.2f}, "
        f"loss {found.loss:.4f} ({len(cases)} cases)"
    )


def _evaluated(trained: Trained, task: Task, cases: Cases, accelerator: str) -> Evaluation:
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    with arguments.naming("--accelerator"):
        fabric = launch(trained.recipe.run.precision, accelerator=accelerator, devices=1)
    model = fabric.setup(trained.model)
    found = evaluate_cases(model, task.goal, cases.to(fabric.device), fabric)
    finish(fabric)
    return found
