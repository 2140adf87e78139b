"""The KSVD objective in the loops of others: the Trainer of transformers, and Lightning."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from primal_attention.extras import needing
from primal_attention.objectives import ksvd_loss


def trainer_callback(eta: float, *, objective: str = "released") -> Any:
    """Make a callback for the ``transformers.Trainer`` that adds ``eta * ksvd_loss`` to the loss.

    While the Trainer trains, the model adds it to the loss that it returns, and its mean since the
    last log (without eta) is logged as ``ksvd``: in the log history, and by the callbacks after
    this one. A Trainer that computes a loss of its own does not see the loss of the model:
    ``label_smoothing_factor`` is an error; a ``compute_loss_func`` has to add
    ``eta * ksvd_loss(model)`` itself.

    Args:
        eta: Weight of the objective.
        objective: Its name, see ``ksvd_loss``.
    """
    with needing("trainer_callback needs transformers", "patch"):
        from transformers import TrainerCallback

    class KSVDCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Hooks the model for the time of the training."""

        hook: Any = None
        added: _AddToLoss

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if args.label_smoothing_factor:
                raise ValueError(
                    f"label_smoothing_factor={args.label_smoothing_factor}: the Trainer then "
                    "computes a loss of its own, without the KSVD objective"
                )
            processes = args.world_size if args.average_tokens_across_devices else 1
            num_parts = int(args.gradient_accumulation_steps * processes)
            self.added = _AddToLoss(eta, objective, num_parts)
            self.hook = others["model"].register_forward_hook(self.added, with_kwargs=True)

        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            logs = others.get("logs") or {}
            if "loss" in logs and self.added.count:
                logs["ksvd"] = state.log_history[-1]["ksvd"] = self.added.mean()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.hook.remove()

    return KSVDCallback()


class KSVDMixin:
    """Adds ``ksvd_eta * ksvd_loss`` to what ``training_step`` of a LightningModule returns.

    Write it before the module in the list of bases::

        class Model(KSVDMixin, MyLightningModule):
            ksvd_eta = 0.1

    Attributes:
        ksvd_eta: Weight of the objective.
        ksvd_objective: Its name, see ``ksvd_loss``.
    """

    ksvd_eta: float
    ksvd_objective: str = "released"

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the module, and add the objective to its loss."""
        step = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if step is None:
            return None
        penalty = self.ksvd_eta * ksvd_loss(self, objective=self.ksvd_objective)  # type: ignore[arg-type]
        if isinstance(step, Mapping):
            return {**step, "loss": step["loss"] + penalty}
        return step + penalty


class _AddToLoss:
    """A forward hook of a model that returns its loss.

    Given the number of items of a whole step, losses of its parts are summed, not averaged.
    """

    def __init__(self, eta: float, objective: str, num_parts: int):
        self.eta, self.objective, self.num_parts = eta, objective, num_parts
        self.total: Tensor | float = 0.0  # of the objective since the last log
        self.count = 0

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not model.training:
            return output
        loss: Tensor | None = getattr(output, "loss", None)
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss; are there labels?")
        parts = self.num_parts if kwargs.get("num_items_in_batch") is not None else 1
        value = ksvd_loss(model, objective=self.objective)
        self.total, self.count = self.total + value.detach(), self.count + 1
        output.loss = loss + self.eta / parts * value
        return output

    def mean(self) -> float:
        """Average the objective since the last log, and forget it."""
        mean = float(self.total) / self.count
        self.total, self.count = 0.0, 0
        return mean
