"""Trained policies: from a run to episodes in the environment, and a row of results.

A run keeps the weights of its last round and those of the round with the lowest error on held-out
episodes. Both are rolled out and both are told: ``last``, which nothing chose, and ``best``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from primal_attention.atomic_files import fitting
from primal_attention.models.decision_transformer import DecisionModel
from primal_attention.tasks import Sizes, offline_rl
from primal_attention.tasks.offline_rl.windows import TOKENS_PER_STEP
from primal_attention.training.checkpoint import BEST, LAST, read_checkpoint
from primal_attention.training.devices import device_name
from primal_attention.training.domains import acts
from primal_attention.training.model_factory import trained_model
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, estimate, key_of

Told: TypeAlias = Callable[[int], None]
"""Callback with the number of each step of the longest episode."""
SELECTIONS = ("last", "best")


class Policies(NamedTuple):
    """Policies of a run: the weights of both rounds, and what it takes to use them."""

    path: Path  # where they were read
    recipe: Recipe
    sizes: Sizes
    encoding: offline_rl.TrajectoryEncoding
    weights: Mapping[str, Mapping[str, Tensor]]  # by selection
    rounds: Mapping[str, Mapping[str, float]]  # by selection: epoch, step and errors

    def model(self, selection: str) -> DecisionModel:
        """Build the model with those weights, on the CPU, in evaluation mode."""
        with fitting(self.path, "a run of policies"):
            model: DecisionModel = trained_model(self.recipe, self.sizes, self.weights[selection])
        return model


def read_policies(path: Path) -> Policies:
    """Read the policies of a run directory."""
    best = read_checkpoint(path / BEST)
    with fitting(path / BEST, "the checkpoint of a policy"):
        recipe = Recipe.from_json(best.facts["recipe"])
    if not acts(recipe):
        raise ValueError(f"{path} is a run of {recipe.task}, which has no environment to act in")
    last = read_checkpoint(path / LAST)
    with fitting(path, "a run of policies"):
        rounds = {"last": last.facts["progress"]["rounds"][-1], "best": best.facts["round"]}
        weights = {"last": last.part("model"), "best": best.tensors}
        encoding = offline_rl.TrajectoryEncoding.from_dict(best.facts["encoding"])
        return Policies(path, recipe, Sizes(**best.facts["sizes"]), encoding, weights, rounds)


def try_policy(
    found: Policies,
    selection: str,
    trial: offline_rl.Trial,
    mode: str = "window",
    *,
    device: torch.device | str = "cpu",
    told: Told = lambda step: None,
    video: Path | None = None,
) -> offline_rl.Rollout:
    """Episodes of one of the policies of a run, see ``roll_out`` and ``policy_of``.

    The model acts on the device; the environment is simulated on the CPU.
    """
    context = found.recipe.data.num_tokens // TOKENS_PER_STEP
    policy = offline_rl.policy_of(found.model(selection).to(device), mode, context)
    environment = offline_rl.environment_of(found.recipe.set_name)
    return offline_rl.roll_out(policy, found.encoding, environment, trial, told=told, video=video)


def _trial_key(found: Policies, selection: str, trial: offline_rl.Trial, mode: str) -> Row:
    """Return the columns that say which policy was tried, and how."""
    environment = offline_rl.environment_of(found.recipe.set_name)
    usual = trial.target == environment.targets[0] and mode == "window"
    return {
        **key_of(found.recipe),
        "selection": selection + ("" if usual else f", {mode}, target {trial.target:g}"),
        "episodes": f"{trial.episodes}",
        "target": f"{trial.target:g}",
        "mode": mode,
        "environment": f"{environment.gym_name}-v{trial.version}",
    }


def _measured(found: Policies, selection: str, rollout: offline_rl.Rollout) -> Row:
    """Return the columns of what came of it: the mean return on the scale of D4RL, an interval."""
    entry = found.rounds[selection]
    scores = estimate(
        offline_rl.environment_of(found.recipe.set_name).score(rollout.returns).tolist()
    )
    return {
        "metric": "return",
        "value": f"{scores.mean:.4f}",
        "valid": f"{entry['valid_action_mse']:.6f}",
        "epoch": f"{entry['epoch']}",
        "steps": f"{entry['step']:.0f}",
        "seconds": "",
        "margin": "" if scores.margin is None else f"{scores.margin:.4f}",
        "return": f"{rollout.returns.mean():.2f}",
        "length": f"{rollout.lengths.mean():.1f}",
    }


def missing_rows(
    found: Policies,
    trial: offline_rl.Trial,
    mode: str,
    rows: Iterable[Row],
    *,
    commit: str,
    device: torch.device | str = "cpu",
    watching: Callable[[str], AbstractContextManager[Told]] | None = None,
    video: Path | None = None,
) -> Iterator[Row]:
    """Make a row for each policy of a run that has none; one that is both is rolled out once.

    Args:
        found: The policies.
        trial: How each is tried.
        mode: One of ``MODES``.
        rows: Those that there are.
        commit: Of the code.
        device: Where the models act.
        watching: Who is told how the episodes of a policy go, by the name of the policy.
        video: A folder for pictures of an episode of each.
    """
    rows, known = list(rows), None
    made = {"device": device_name(torch.device(device)), "commit": commit}
    made["torch"] = torch.__version__
    for selection in SELECTIONS:
        key = _trial_key(found, selection, trial, mode)
        if any(key.items() <= row.items() for row in rows):
            continue
        if known is None or found.rounds["last"] != found.rounds["best"]:
            recipe = found.recipe
            name = f"{recipe.set_name}-{recipe.model.name}-seed{recipe.run.seed}-{selection}"
            with watching(name) if watching else nullcontext(lambda step: None) as told:
                place = video and video / f"{name}.gif"
                known = try_policy(
                    found, selection, trial, mode, device=device, told=told, video=place
                )
        yield {**key, **_measured(found, selection, known), **made}
