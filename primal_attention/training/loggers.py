"""Where the numbers of each round go beside the run directory, by Lightning's loggers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from primal_attention.attention.base.validation import check_choice
from primal_attention.extras import needing

_PROJECT = "primal-attention"
LOGGERS: dict[str, Callable[[Any, Path], Any]] = {
    "tensorboard": lambda kinds, place: kinds.TensorBoardLogger(place, name="", version=""),
    "wandb": lambda kinds, place: kinds.WandbLogger(
        name=place.name, project=_PROJECT, save_dir=place
    ),
    "mlflow": lambda kinds, place: kinds.MLFlowLogger(_PROJECT, run_name=place.name),
}


def build_logger(name: str, directory: Path, settings: Mapping[str, Any]) -> Any:
    """Make a logger for ``launch(loggers=...)`` that notes the settings of the run at once.

    Args:
        name: ``tensorboard``, ``wandb`` or ``mlflow``, which has to be installed.
        directory: The run directory, whose name is that of the run.
        settings: The recipe, flat.
    """
    check_choice("logger", name, LOGGERS)
    with needing("loggers need Lightning", "train"):
        from pytorch_lightning import loggers as kinds
    try:
        logger = LOGGERS[name](kinds, directory)
    except ModuleNotFoundError as error:
        told = f"logger {name!r} needs its package: pip install {name}"
        raise ModuleNotFoundError(told, name=error.name) from error
    logger.log_hyperparams(dict(settings))
    return logger
