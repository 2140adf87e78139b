"""Prepared files: trajectories in one `.npz`, which numpy alone reads.

States and actions are kept in half precision: a set of 100 000 transitions takes 3 to 5 MB.
"""

import json
from pathlib import Path

import numpy as np

from primal_attention.array_files import open_arrays, write_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories

FORMAT = "primal-attention trajectories, version 1"
_ARRAYS = ("states", "actions", "rewards", "lengths", "terminated")


def write_trajectories(path: Path, found: Trajectories, *, half: bool = True) -> None:
    """Write them; under another name first, so that a file of this name is always whole.

    In half precision the final states, which nothing here learns from, are left out.
    """
    arrays = {name: getattr(found, name) for name in _ARRAYS}
    if found.final_states is not None and not half:
        arrays["final_states"] = found.final_states.astype(np.float32)
    kept = np.float16 if half else np.float32
    for name, kind in (("states", kept), ("actions", kept), ("rewards", np.float32)):
        arrays[name] = arrays[name].astype(kind)
    about = {"format": np.array(FORMAT), "facts": np.array(json.dumps(found.facts))}
    write_arrays(path, about | arrays, compressed=True)


def read_trajectories(path: Path, environment: Environment) -> Trajectories:
    """The trajectories of a prepared file."""
    remedy = "delete it, and write it anew with primal data rl"
    with reading(path, "a whole prepared set of trajectories", remedy), open_arrays(path) as arrays:
        if (written := arrays.text("format")) != FORMAT:
            raise ValueError(f"its format is {written!r}, not {FORMAT!r}")
        values = {name: arrays[name] for name in _ARRAYS}
        final = arrays.get("final_states")
        facts = json.loads(arrays.text("facts"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are no JSON object")
        found = Trajectories(**values, final_states=final, facts=facts)
    check_trajectories(found, environment, path)
    return found
