"""Trajectories from files: what is read, and what is refused with its file and episode."""

import h5py
import numpy as np
import pytest

from primal_attention.tasks.offline_rl import RL, find_rl, load_rl, prepare_rl
from primal_attention.tasks.offline_rl.environments import environment_of

from .toy_rl import trajectories

NAME = "hopper-medium"


def d4rl_arrays(found, extra=0):
    """As D4RL has them; `extra` steps of an episode that the file cuts off."""
    ends = np.cumsum(found.lengths) - 1
    flags = {name: np.zeros(len(found.rewards) + extra, bool) for name in ("terminals", "timeouts")}
    flags["terminals"][ends[found.terminated]] = True
    flags["timeouts"][ends[~found.terminated]] = True
    steps = {"observations": found.states, "actions": found.actions, "rewards": found.rewards}
    longer = {
        name: np.concatenate([each, each[:1].repeat(extra, axis=0)]) for name, each in steps.items()
    }
    return longer | flags


def write_d4rl(path, arrays):
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return path


def same(ours, theirs, tolerance=0.0):
    for name in ("states", "actions", "rewards", "lengths", "terminated"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), tolerance, tolerance)


def test_a_file_of_d4rl(tmp_path):
    found = trajectories()
    write_d4rl(tmp_path / "hopper_medium-v2.hdf5", d4rl_arrays(found, extra=2))
    read = load_rl(NAME, tmp_path)
    same(read, found)
    assert read.facts == {
        "name": "hopper_medium-v2.hdf5",
        "origin": "D4RL",
        "left_out_transitions": 2,
    }


def test_a_prepared_file_takes_the_place_of_others(tmp_path):
    found = trajectories()
    write_d4rl(tmp_path / f"{NAME}.hdf5", d4rl_arrays(found))
    path = prepare_rl(NAME, tmp_path)
    assert find_rl(NAME, tmp_path) == path == tmp_path / f"{NAME}.npz"
    read = load_rl(NAME, tmp_path)
    assert read.states.dtype == np.float16
    same(read, found, tolerance=1e-2)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def poisoned(name, episode, step):
    found = trajectories()
    getattr(found, name)[found.starts[episode] + step] = np.nan
    return found


@pytest.mark.parametrize("name", ["states", "actions", "rewards"])
def test_what_is_not_finite_is_named(tmp_path, name):
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", d4rl_arrays(poisoned(name, 2, 13)))
    with pytest.raises(ValueError, match=f"{path} .*{name} of episode 2, step 13"):
        load_rl(NAME, tmp_path)
    RL.write(tmp_path / f"{NAME}.npz", poisoned(name, 4, 10))
    with pytest.raises(ValueError, match=rf"npz .*{name} of episode 4, step 10"):
        load_rl(NAME, tmp_path)


@pytest.mark.parametrize("name", ["observations", "actions"])
def test_wrong_dims_are_refused(tmp_path, name):
    arrays = d4rl_arrays(trajectories())
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", arrays | {name: arrays[name][:, :-1]})
    with pytest.raises(ValueError, match=f"{path} .* of episode 0 .* Hopper"):
        load_rl(NAME, tmp_path)


def test_missing_flags_are_refused(tmp_path):
    path = tmp_path / f"{NAME}.hdf5"
    arrays = d4rl_arrays(trajectories())
    write_d4rl(path, {name: each for name, each in arrays.items() if name != "timeouts"})
    with pytest.raises(ValueError, match=f"{path} .*it has no 'timeouts'"):
        load_rl(NAME, tmp_path)
    write_d4rl(
        path,
        arrays | {"terminals": arrays["terminals"] & False, "timeouts": False * arrays["timeouts"]},
    )
    with pytest.raises(ValueError, match=f"{path} .*episode 0 has no flag"):
        load_rl(NAME, tmp_path)
    write_d4rl(path, d4rl_arrays(trajectories(), extra=1001))
    with pytest.raises(ValueError, match=f"{path} .*episode 5 has no flag .* 1001 steps"):
        load_rl(NAME, tmp_path)
    write_d4rl(path, d4rl_arrays(trajectories(np.array([3, 1001, 4]))))
    with pytest.raises(ValueError, match=f"{path} .*episode 1 has 1001 steps"):
        load_rl(NAME, tmp_path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def test_files_that_are_cut_off_are_refused(tmp_path):
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", d4rl_arrays(trajectories()))
    cut(path)
    with pytest.raises(ValueError, match=f"{path} is not a whole hdf5 file"):
        load_rl(NAME, tmp_path)
    prepared = tmp_path / f"{NAME}.npz"
    RL.write(prepared, trajectories())
    cut(prepared)
    with pytest.raises(ValueError, match="not a whole prepared set"):
        RL.read(prepared, "hopper-medium")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"hopper_medium-v2\.hdf5 there, or make a set"):
        load_rl(NAME, tmp_path)
    with pytest.raises(ValueError, match="did you mean one of hopper-medium"):
        load_rl("hopper-mediun", tmp_path)
    assert find_rl(NAME, tmp_path) is None


def test_scores():
    hopper = environment_of("hopper-medium-expert")
    assert hopper.score(3234.3) == pytest.approx(100)
    assert hopper.score(-20.272305) == pytest.approx(0)
