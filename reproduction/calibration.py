"""Train the recipes of studies and measure the probabilities that they give the test cases.

    python reproduction/calibration.py primal_attention/uncertainty --runs runs/uncertainty

Beside results.csv, calibration.csv has one row a run and way to probabilities: the plain softmax,
that with a temperature fitted on the held-out training cases, and for models with uncertainty the
mean over draws, with and without a temperature.
"""

from collections.abc import Iterator

import torch
from measuring import Numbers, Trained, main, parse_arguments
from torch import Tensor, nn

from primal_attention.calibration import calibration, fit_temperature
from primal_attention.tasks import Cases
from primal_attention.uncertainty import is_uncertain, log_predictive

FILE, BATCH, DRAWS = "calibration.csv", 64, 20


def measured(trained: Trained) -> dict[str, list[Numbers]]:
    """One row a way to probabilities."""
    torch.manual_seed(trained.recipe.run.seed)
    model, task = trained.model, trained.task
    rows = []
    for draws in (0, DRAWS) if is_uncertain(model) else (0,):
        held_out, logits = (outputs(model, cases, draws) for cases in (task.valid, task.test))
        fitted = fit_temperature(held_out, task.valid.target)
        for temperature in (1.0, fitted):
            found = calibration((logits / temperature).softmax(1), task.test.target)
            numbers = {**found._asdict(), "accuracy": 100 * found.accuracy}
            scaled = "yes" if temperature != 1 else "no"
            rows.append({"draws": draws, "scaled": scaled, "temperature": temperature, **numbers})
    return {FILE: rows}


@torch.no_grad()
def outputs(model: nn.Module, cases: Cases, draws: int) -> Tensor:
    """Logits of the mean weights, or the logarithm of the mean probability over draws."""
    return torch.cat(
        [
            log_predictive(model, **inputs, draws=draws) if draws else model(**inputs)
            for inputs in batches(cases)
        ]
    )


def batches(cases: Cases) -> Iterator[dict[str, Tensor]]:
    for indices in torch.arange(len(cases)).split(BATCH):
        yield cases[indices].inputs


if __name__ == "__main__":
    main(measured, FILE, parse_arguments(str(__doc__)))
