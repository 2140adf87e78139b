"""The KSVD objective in the loops of others: the Trainer of transformers, and Lightning."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from primal_attention.objectives import ksvd_loss


def trainer_callback(eta: float, *, objective: str = "released") -> Any:
    """A callback for the ``transformers.Trainer`` that adds ``eta * ksvd_loss`` to the loss.

    While the Trainer trains, the model adds it to the loss that it returns. A Trainer that computes
    a loss of its own does not see that one: ``label_smoothing_factor`` is an error; a
    ``compute_loss_func`` has to add ``eta * ksvd_loss(model)`` itself.

    Args:
        eta: Weight of the objective.
        objective: Which one, see ``ksvd_loss``.
    """
    from transformers import TrainerCallback

    class KSVDCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Hooks the model for the time of the training."""

        hook: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if args.label_smoothing_factor:
                raise ValueError(
                    f"label_smoothing_factor={args.label_smoothing_factor}: the Trainer then "
                    "computes a loss of its own, without the KSVD objective"
                )
            hook = _AddToLoss(eta, objective, _steps_of_a_sum(args))
            self.hook = others["model"].register_forward_hook(hook, with_kwargs=True)

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
        ksvd_objective: Which one, see ``ksvd_loss``.
    """

    ksvd_eta: float
    ksvd_objective: str = "released"

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the module, with the objective added to its loss."""
        step = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if step is None:
            return None
        penalty = self.ksvd_eta * ksvd_loss(self, objective=self.ksvd_objective)  # type: ignore[arg-type]
        if isinstance(step, Mapping):
            return {**step, "loss": step["loss"] + penalty}
        return step + penalty


class _AddToLoss:
    """A forward hook of a model that returns its loss."""

    def __init__(self, eta: float, objective: str, steps_of_a_sum: int):
        self.eta, self.objective, self.steps_of_a_sum = eta, objective, steps_of_a_sum

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not model.training:
            return output
        loss: Tensor | None = getattr(output, "loss", None)
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss; are there labels?")
        # Given the number of items of a whole step, losses of its parts are summed, not averaged.
        parts = self.steps_of_a_sum if kwargs.get("num_items_in_batch") is not None else 1
        output.loss = loss + self.eta / parts * ksvd_loss(model, objective=self.objective)
        return output


def _steps_of_a_sum(args: Any) -> int:
    processes = args.world_size if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps * processes)
