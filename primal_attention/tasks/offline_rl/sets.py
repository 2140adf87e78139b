"""Where the trajectories of a set are read from; prepared, they are one file of a few MB.

States and actions are kept in half precision there: 100,000 transitions take 3 to 5 MB.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.array_files import ArrayFile, write_arrays
from primal_attention.tasks.offline_rl import hdf5_files
from primal_attention.tasks.offline_rl.environments import environment_of
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories
from primal_attention.tasks.prepared import PreparedSets

_ARRAYS = ("states", "actions", "rewards", "lengths", "terminated")


class TrajectorySets(PreparedSets[Trajectories]):
    """The sets of trajectories.

    In a folder they are looked for in this order: a prepared ``<name>.npz``; D4RL's own
    ``<name>.hdf5`` or ``hopper_medium-v2.hdf5``; a Minari data set in ``<name>``,
    ``D4RL-like/hopper/medium-v0`` or ``mujoco/hopper/medium-v0``.
    """

    domain, format = "rl", "primal-attention trajectories, version 1"
    kind, remedy = "set of trajectories", "primal data rl"
    looks_around = False

    def _check_name(self, name: str) -> None:
        environment_of(name)

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        place = self.folders(folder)[0]
        which, _, kind = name.partition("-")
        files = (place / f"{name}.hdf5", place / hdf5_files.d4rl_file(name))
        minari = (
            place / name,
            hdf5_files.minari_folder(place, name),
            place / "mujoco" / which / f"{kind}-v0",
        )
        found = [each for each in files if each.is_file()]
        found += [each for each in minari if (each / "data").is_dir()]
        return found[0] if found else None

    def _read_files(self, name: str, place: Path) -> Trajectories:
        environment = environment_of(name)
        found = (hdf5_files.read_d4rl if place.is_file() else hdf5_files.read_minari)(
            place, environment
        )
        check_trajectories(found, environment, place)
        return found

    def read(self, path: Path, name: str | None = None) -> Trajectories:
        """Read and check a prepared file."""
        found = super().read(path, name)
        check_trajectories(found, environment_of(path.stem if name is None else name), path)
        return found

    def write(self, path: Path, found: Trajectories, *, half: bool = True) -> None:
        """Write a prepared file.

        In half precision the final states, which nothing here learns from, are left out.
        """
        arrays = self._pack(found)
        if not half:
            arrays |= {name: getattr(found, name).astype(np.float32) for name in _ARRAYS[:2]}
            if found.final_states is not None:
                arrays["final_states"] = found.final_states.astype(np.float32)
        write_arrays(path, {"format": np.array(self.format), **arrays}, compressed=True)

    def _pack(self, found: Trajectories) -> dict[str, Any]:
        arrays = {name: getattr(found, name) for name in _ARRAYS}
        kinds = {"states": np.float16, "actions": np.float16, "rewards": np.float32}
        arrays |= {name: arrays[name].astype(kind) for name, kind in kinds.items()}
        return {"facts": np.array(json.dumps(found.facts)), **arrays}

    def _unpack(self, arrays: ArrayFile, path: Path, name: str) -> Trajectories:
        values = {key: arrays[key] for key in _ARRAYS}
        final = arrays.get("final_states")
        facts = json.loads(arrays.text("facts"))
        if not isinstance(facts, dict):
            raise ValueError("its facts are no JSON object")
        return Trajectories(**values, final_states=final, facts=facts)

    def _advice(self, name: str, folder: Path | None) -> str:
        return (
            f"{name}: no data in {self.folders(folder)[0]}. Put a prepared {name}.npz, D4RL's "
            f"{hdf5_files.d4rl_file(name)} or a Minari data set there, or make one: "
            f"primal data rl {name} --agents <folder of policies>"
        )


RL = TrajectorySets()
find_rl, load_rl, prepare_rl = RL.find, RL.load, RL.prepare


def rl_folder(folder: Path | None = None) -> Path:
    """Return a given folder, else ``rl`` where ``PRIMAL_DATA`` points, else ``data/rl``."""
    return RL.folders(folder)[0]
