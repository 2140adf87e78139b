"""Prepared files: trajectories in one `.npz`, which numpy alone reads.

States and actions are kept in half precision: a set of 100 000 transitions takes 3 to 5 MB.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories
from primal_attention.tasks.prepared import WRONG_FILE
from primal_attention.whole_files import replacing

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
    facts = np.array(json.dumps(found.facts))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as incoming, incoming.open("wb") as file:
        np.savez_compressed(file, format=np.array(FORMAT), facts=facts, **arrays)


def read_trajectories(path: Path, environment: Environment) -> Trajectories:
    """The trajectories of a prepared file."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if (written := str(arrays["format"])) != FORMAT:
                raise ValueError(f"its format is {written!r}, not {FORMAT!r}")
            values = {name: arrays[name] for name in _ARRAYS}
            final = arrays.get("final_states")
            facts = json.loads(str(arrays["facts"]))
            found = Trajectories(**values, final_states=final, facts=facts)
    except WRONG_FILE as error:
        raise ValueError(
            f"{path} is not a whole prepared set of trajectories ({error}); delete it, and write "
            "it anew with primal data rl"
        ) from error
    check_trajectories(found, environment, path)
    return found
