"""Offline reinforcement learning: trajectories, windows, policies, roll-outs."""

from primal_attention.tasks.offline_rl.environments import ENVIRONMENTS, RL_SETS, environment_of
from primal_attention.tasks.offline_rl.rollout import MODES, Rollout, Trial, policy_of, roll_out
from primal_attention.tasks.offline_rl.sets import RL, find_rl, load_rl, prepare_rl
from primal_attention.tasks.offline_rl.trajectories import Trajectories
from primal_attention.tasks.offline_rl.windows import (
    TOKENS_PER_STEP,
    TrajectoryEncoding,
    Windows,
    rl_task,
)

__all__ = [
    "ENVIRONMENTS",
    "MODES",
    "RL",
    "RL_SETS",
    "TOKENS_PER_STEP",
    "Rollout",
    "Trajectories",
    "TrajectoryEncoding",
    "Trial",
    "Windows",
    "environment_of",
    "find_rl",
    "load_rl",
    "policy_of",
    "prepare_rl",
    "rl_task",
    "roll_out",
]
