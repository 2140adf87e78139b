"""Where the trajectories of a set are read from; prepared, they are one file of a few MB.

States and actions are kept in half precision there: 100,000 transitions take 3 to 5 MB.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.array_files import ArrayFile
from primal_attention.tasks.offline_rl.d4rl_files import d4rl_file, read_d4rl
from primal_attention.tasks.offline_rl.environments import RL_SETS, environment_of
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories
from primal_attention.tasks.prepared import PreparedSets, data_folders

_KINDS = {"states": np.float16, "actions": np.float16, "rewards": np.float32}
_ARRAYS = (*_KINDS, "lengths", "terminated")


class TrajectorySets(PreparedSets[Trajectories]):
    """The sets of trajectories.

    In a folder they are looked for in this order: a prepared ``<name>.npz``; D4RL's own
    ``<name>.hdf5`` or ``hopper_medium-v2.hdf5``.
    """

    domain, format = "rl", "primal-attention trajectories, version 1"
    names, noun, compressed = RL_SETS, "set of trajectories", True

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        kinds = (f"{name}.hdf5", d4rl_file(name))
        files = (place / kind for place in data_folders(self.domain, folder) for kind in kinds)
        return next((each for each in files if each.is_file()), None)

    def _read_files(self, name: str, place: Path) -> Trajectories:
        return read_d4rl(place, environment_of(name))

    def _pack(self, found: Trajectories) -> dict[str, Any]:
        arrays = {name: getattr(found, name) for name in _ARRAYS}
        arrays |= {name: arrays[name].astype(kind) for name, kind in _KINDS.items()}
        return {
            "format": np.array(self.format),
            "facts": np.array(json.dumps(found.facts)),
            **arrays,
        }

    def _unpack(self, arrays: ArrayFile, name: str) -> Trajectories:
        facts = json.loads(arrays.text("facts"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are no JSON object")
        found = Trajectories(**{key: arrays[key] for key in _ARRAYS}, facts=facts)
        check_trajectories(found, environment_of(name))
        return found

    def _advice(self, name: str, folder: Path | None) -> str:
        place = data_folders(self.domain, folder)[0]
        return (
            f"{name}: no data in {place}. Put a prepared {name}.npz or D4RL's "
            f"{d4rl_file(name)} there, or make a set like it from trained policies with "
            "reproduction/primal_attention/table4_d4rl/make_sets.py"
        )


RL = TrajectorySets()
find_rl, load_rl, prepare_rl = RL.find, RL.load, RL.prepare
