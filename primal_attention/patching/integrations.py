"""Patched models in the hands of others: the Trainer of transformers, the adapters of peft."""

from typing import Any

from torch import Tensor, nn

from primal_attention.extras import needing
from primal_attention.objectives import ksvd_loss
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.sites import patched_layers


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


def lora_config(model: nn.Module, **options: Any) -> Any:
    """Make a ``peft.LoraConfig`` with which a patched model learns, new parameters included.

    Adapters go to every linear projection of the body that was kept. LoRA freezes the rest, so what
    is new is trained and saved whole: the new modules of a layer, or its ``mechanism`` where some
    are plain parameters, as Primal's directions are. They start at random: ``distill`` first, or
    train for longer.

    Args:
        model: A patched model, before adapters are added.
        **options: Options of ``LoraConfig``; ``modules_to_save`` are added to those of the layers.
    """
    with needing("lora_config needs peft", "lora"):
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no patched layer; use peft.LoraConfig")
    saved = [f"{name}.{module}" for name, layer in layers.items() for module in _new_modules(layer)]
    body: Any = getattr(model, "base_model", model)
    inside = {id(module) for module in body.modules()}
    inside -= {id(each) for name in saved for each in model.get_submodule(name).modules()}
    kept = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in inside
    ]
    saved += options.pop("modules_to_save", None) or []
    return LoraConfig(**{"target_modules": kept} | options, modules_to_save=saved or None)


def _new_modules(layer: PatchedAttention) -> list[str]:
    """Name the modules of a layer that hold its new parameters."""
    new = [f"mechanism.{name}" for name in layer.record.new]
    plain = any(isinstance(getattr(layer.mechanism, name), Tensor) for name in layer.record.new)
    return ["mechanism"] if plain else new
