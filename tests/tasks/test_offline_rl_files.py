"""Trajectories from files: what is read, and what is refused with its file and episode."""

import h5py
import numpy as np
import pytest

from primal_attention.tasks.offline_rl import RL, find_rl, load_rl, prepare_rl
from primal_attention.tasks.offline_rl.environments import (
    ENVIRONMENTS,
    environment_of,
    make_environment,
)
from primal_attention.tasks.offline_rl.hdf5_files import (
    minari_folder,
    read_minari,
    write_minari,
)

from .toy_rl import HOPPER, LENGTHS, trajectories

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


def test_minari_there_and_back(tmp_path):
    found = trajectories()
    simulator = make_environment(HOPPER)
    path = write_minari(tmp_path, NAME, found, simulator)
    assert path == minari_folder(tmp_path, NAME) == find_rl(NAME, tmp_path)
    read = load_rl(NAME, tmp_path)
    same(read, found, tolerance=1e-6)
    np.testing.assert_array_equal(read.final_states, found.final_states)
    assert read.facts == found.facts
    write_minari(tmp_path, NAME, trajectories(seed=1), simulator)  # replaces the first
    assert not np.array_equal(load_rl(NAME, tmp_path).states, read.states)


def test_minari_itself_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    import minari

    write_minari(tmp_path, NAME, trajectories(), make_environment(HOPPER))
    dataset = minari.load_dataset("D4RL-like/hopper/medium-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (len(LENGTHS), LENGTHS.sum())


def poisoned(name, episode, step):
    found = trajectories()
    getattr(found, name)[found.starts[episode] + step] = np.nan
    return found


@pytest.mark.parametrize("name", ["states", "actions", "rewards"])
def test_what_is_not_finite_is_named(tmp_path, name):
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", d4rl_arrays(poisoned(name, 2, 13)))
    with pytest.raises(ValueError, match=f"{path}: {name} of episode 2, step 13"):
        load_rl(NAME, tmp_path)
    RL.write(tmp_path / f"{NAME}.npz", poisoned(name, 4, 10))
    with pytest.raises(ValueError, match=rf"npz: {name} of episode 4, step 10"):
        load_rl(NAME, tmp_path)


@pytest.mark.parametrize("name", ["observations", "actions"])
def test_wrong_dims_are_refused(tmp_path, name):
    arrays = d4rl_arrays(trajectories())
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", arrays | {name: arrays[name][:, :-1]})
    with pytest.raises(ValueError, match=f"{path}: .* of episode 0 .* Hopper"):
        load_rl(NAME, tmp_path)


def test_wrong_dims_of_minari_are_refused(tmp_path):
    walker = ENVIRONMENTS["walker2d"]
    write_minari(tmp_path, NAME, trajectories(environment=walker), make_environment(walker))
    with pytest.raises(
        ValueError, match=r"medium-v0.*observations of episode 0 must be \[steps, 11"
    ):
        load_rl(NAME, tmp_path)


def test_missing_flags_are_refused(tmp_path):
    path = tmp_path / f"{NAME}.hdf5"
    arrays = d4rl_arrays(trajectories())
    write_d4rl(path, {name: each for name, each in arrays.items() if name != "timeouts"})
    with pytest.raises(ValueError, match=f"{path} .*it has no 'timeouts': .* episode 0"):
        load_rl(NAME, tmp_path)
    write_d4rl(
        path,
        arrays | {"terminals": arrays["terminals"] & False, "timeouts": False * arrays["timeouts"]},
    )
    with pytest.raises(ValueError, match=f"{path}: episode 0 has no flag"):
        load_rl(NAME, tmp_path)
    write_d4rl(path, d4rl_arrays(trajectories(), extra=1001))
    with pytest.raises(ValueError, match=f"{path}: episode 5 has no flag .* 1001 steps"):
        load_rl(NAME, tmp_path)
    write_d4rl(path, d4rl_arrays(trajectories(np.array([3, 1001, 4]))))
    with pytest.raises(ValueError, match=f"{path}: episode 1 has 1001 steps"):
        load_rl(NAME, tmp_path)


def test_an_episode_of_minari_without_an_end_is_refused(tmp_path):
    path = write_minari(tmp_path, NAME, trajectories(), make_environment(HOPPER))
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for name in ("terminations", "truncations"):
            file["episode_3"][name][...] = False
    with pytest.raises(ValueError, match=r"medium-v0.*episode 3 has no flag at its end"):
        load_rl(NAME, tmp_path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def test_files_that_are_cut_off_are_refused(tmp_path):
    path = write_d4rl(tmp_path / f"{NAME}.hdf5", d4rl_arrays(trajectories()))
    cut(path)
    with pytest.raises(ValueError, match=f"{path} is not a whole hdf5 file"):
        load_rl(NAME, tmp_path)
    path.unlink()
    folder = write_minari(tmp_path, NAME, trajectories(), make_environment(HOPPER))
    cut(folder / "data" / "main_data.hdf5")
    with pytest.raises(ValueError, match=f"{folder}.*main_data.hdf5 is not a whole file of Minari"):
        read_minari(folder, HOPPER)
    prepared = tmp_path / f"{NAME}.npz"
    RL.write(prepared, trajectories())
    cut(prepared)
    with pytest.raises(ValueError, match="not a whole prepared set"):
        RL.read(prepared, "hopper-medium")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"hopper_medium-v2\.hdf5 or a Minari data set"):
        load_rl(NAME, tmp_path)
    with pytest.raises(ValueError, match="did you mean one of hopper-medium"):
        load_rl("hopper-mediun", tmp_path)
    assert find_rl(NAME, tmp_path) is None


def test_scores():
    hopper = environment_of("hopper-medium-expert")
    assert hopper.score(3234.3) == pytest.approx(100)
    assert hopper.score(-20.272305) == pytest.approx(0)
