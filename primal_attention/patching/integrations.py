"""The KSVD objective in the loop of others: the Trainer of transformers."""

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
        num_parts = 1  # of a step, whose losses are summed where the number of all items is given
        total: Tensor | float = 0.0  # of the objective since the last log
        count = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if args.label_smoothing_factor:
                raise ValueError(
                    f"label_smoothing_factor={args.label_smoothing_factor}: the Trainer then "
                    "computes a loss of its own, without the KSVD objective"
                )
            processes = args.world_size if args.average_tokens_across_devices else 1
            self.num_parts = int(args.gradient_accumulation_steps * processes)
            self.hook = others["model"].register_forward_hook(self.add_to_loss, with_kwargs=True)

        def add_to_loss(
            self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
        ) -> Any:
            if not model.training:
                return output
            loss: Tensor | None = getattr(output, "loss", None)
            if loss is None:
                raise ValueError(f"{type(model).__name__} returned no loss; are there labels?")
            parts = self.num_parts if kwargs.get("num_items_in_batch") is not None else 1
            value = ksvd_loss(model, objective=objective)
            self.total, self.count = self.total + value.detach(), self.count + 1
            output.loss = loss + eta / parts * value
            return output

        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            logs = others.get("logs") or {}
            if "loss" in logs and self.count:
                logs["ksvd"] = state.log_history[-1]["ksvd"] = float(self.total) / self.count
                self.total, self.count = 0.0, 0

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.hook.remove()

    return KSVDCallback()
