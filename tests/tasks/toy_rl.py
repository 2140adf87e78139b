"""Trajectories as small as it gets, and policies that do not know what they do."""

import h5py
import numpy as np

from primal_attention.tasks.offline_rl import ENVIRONMENTS, Trajectories

HOPPER = ENVIRONMENTS["hopper"]
LENGTHS = np.array([7, 3, 23, 5, 11])


def trajectories(lengths=LENGTHS, seed=0, environment=HOPPER):
    rng = np.random.default_rng(seed)
    total = int(lengths.sum())
    return Trajectories(
        rng.normal(3, 2, (total, environment.state_dim)),
        rng.uniform(-1, 1, (total, environment.action_dim)),
        rng.normal(1, 1, total),
        lengths,
        np.arange(len(lengths)) % 2 == 0,
        {"name": "toy"},
    )


def write_agents(folder, names=("sac",), environment=HOPPER, **changes):
    """Policies in the format that data are made with."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    S, A, D = environment.state_dim, environment.action_dim, 5
    for name in names:
        arrays = {
            "n_layers": 2,
            "w0": rng.normal(size=(D, S)).astype(np.float32),
            "b0": np.zeros(D, np.float32),
            "w1": rng.normal(size=(A, D)).astype(np.float32),
            "b1": np.zeros(A, np.float32),
            "activation": "relu",
            "squash": "tanh",
            "noise": "state-dependent",
            "log_std_weight": rng.normal(size=(A, D)).astype(np.float32),
            "log_std_bias": np.zeros(A, np.float32),
            "log_std_min": -20.0,
            "log_std_max": 2.0,
            "normalise_obs": True,
            "obs_mean": np.full(S, 0.5),
            "obs_var": np.full(S, 4.0),
            "obs_clip": 10.0,
            "obs_eps": 1e-8,
            "time_feature": False,
            "obs_dim": S,
            "act_dim": A,
        }
        np.savez(folder / f"{environment.gym_name}-{name}.npz", **arrays | changes)
    return folder


def write_d4rl(path, **changed):
    """A file of D4RL, with other things in place of some arrays."""
    found = trajectories()
    total = len(found.rewards)
    ends = np.zeros(total, bool)
    ends[np.cumsum(found.lengths) - 1] = True
    arrays = {
        "observations": found.states,
        "actions": found.actions,
        "rewards": found.rewards,
        "terminals": ends,
        "timeouts": ends & False,
    }
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if name in changed:
                changed[name](file, name)
            else:
                file[name] = values
