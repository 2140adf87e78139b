"""The numbers of each round beside the run directory."""

import sys

import pytest

from primal_attention.training import launch, train_in
from primal_attention.training.loggers import LOGGERS, build_logger

from .toy import toy_recipe, toy_task


def test_tensorboard_gets_every_round(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = toy_recipe()
    logger = build_logger("tensorboard", tmp_path, recipe.flat())
    fabric = launch(accelerator="cpu", devices=1, loggers=[logger])
    outcome = train_in(tmp_path, recipe, toy_task(), fabric)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    losses = [entry["train_loss"] for entry in outcome.rounds]
    assert [each.value for each in events.Scalars("train_loss")] == pytest.approx(losses)


@pytest.mark.parametrize(("name", "kind"), [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")])
def test_others_are_named_after_the_run_and_get_the_settings(tmp_path, monkeypatch, name, kind):
    from pytorch_lightning import loggers

    class Recorded:
        def __init__(self, *args, **options):
            self.options = options

        def log_hyperparams(self, settings):
            self.settings = settings

    monkeypatch.setattr(loggers, kind, Recorded)
    logger = build_logger(name, tmp_path / "0123", toy_recipe().flat())
    assert "0123" in logger.options.values()
    assert logger.settings == toy_recipe().flat()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {name}"):
        build_logger(name, tmp_path, {})


def test_unknown_names_are_an_error(tmp_path):
    assert list(LOGGERS) == ["tensorboard", "wandb", "mlflow"]
    with pytest.raises(ValueError, match="logger must be one of 'tensorboard'"):
        build_logger("comet", tmp_path, {})
