"""Optimisers of recipes, and RAdam in few launches for steps that are replayed as a graph."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primal_attention.attention.primal import KSVDLayer
from primal_attention.training.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module, *, capturable: bool = False) -> Optimizer:
    """Build the optimiser of a recipe over the parameters that are not frozen.

    No weight decay pulls at those that a model names, ``undecayed()``, nor at Lambda, whose zero is
    no smaller model: softplus(0) is 0.69.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    undecayed: Any = getattr(model, "undecayed", list)
    spared = {id(each) for each in undecayed()}
    if recipe.optim.weight_decay:
        layers = (each for each in model.modules() if isinstance(each, KSVDLayer))
        spared |= {id(layer.raw_lambda) for layer in layers if layer.raw_lambda.requires_grad}
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in spared]}]
    if spared:
        groups.append({"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0})
    settings = {
        "lr": recipe.optim.lr,
        "weight_decay": recipe.optim.weight_decay,
        "betas": (0.9, recipe.optim.adam_beta2),
        "eps": recipe.optim.adam_eps,
        "capturable": capturable,
    }
    plain, replayed = _OPTIMIZERS[recipe.optim.optimizer]
    optimizer: Optimizer = (replayed if capturable else plain)(groups, **settings)
    return optimizer


class LeanRAdam(torch.optim.RAdam):
    """The updates and the state of ``torch.optim.RAdam``, with the step's factors computed once.

    They depend on the number of the step alone, which all parameters share: each of them has a
    gradient in every step, or in none. Nothing synchronises. The capturable form of torch takes a
    few launches more for each parameter and computes rho in float32, which changes the numbers.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters once: theta -= m (adaptive / (sqrt(v) + eps) + plain)."""
        for group in self.param_groups:
            lists: Any = [[] for _ in range(5)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            parameters, gradients, first, second, steps = lists
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            if group["weight_decay"]:
                gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
            torch._foreach_add_(steps, 1)
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            factors = _factors(steps[0].double(), group["lr"], beta1, beta2)
            adaptive, plain = (factor.to(parameters[0].dtype) for factor in factors)
            sizes = torch._foreach_sqrt(second)
            torch._foreach_add_(sizes, group["eps"])
            torch._foreach_reciprocal_(sizes)
            torch._foreach_mul_(sizes, adaptive)
            torch._foreach_add_(sizes, plain, alpha=1)  # without alpha it is read as a number
            torch._foreach_addcmul_(parameters, first, sizes, -1)


def _factors(t: Tensor, lr: float | Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Compute the factors of the update with second moments and without; one of them is zero.

    The second moments are used from where their average is long enough (rho > 5), and then
    rectified. Float32 would leave few digits of rho at first, a small difference of large numbers.
    """
    decay = beta2**t
    rho_end = 2 / (1 - beta2) - 1
    rho = rho_end - 2 * t * decay / (1 - decay)
    rate = lr / (1 - beta1**t)
    end = (rho_end - 4) * (rho_end - 2) / rho_end
    rectified = torch.sqrt((rho - 4) * (rho - 2) / (rho * end) * (1 - decay))
    is_long = rho > 5
    zero = torch.zeros_like(rate)
    return torch.where(is_long, rate * rectified, zero), torch.where(is_long, zero, rate)


#   The plain form, and the one to replay on a GPU, with few passes over the parameters.
_OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "radam": (torch.optim.RAdam, LeanRAdam),
    "adam": (torch.optim.Adam, partial(torch.optim.Adam, fused=True)),
    "adamw": (torch.optim.AdamW, partial(torch.optim.AdamW, fused=True)),
}
