"""Processes that share a study; one of them is killed in the middle of a trial."""

import multiprocessing
import time

import pytest

from primal_attention.atomic_files import holding
from primal_attention.training.sweeps import open_study, run_trials, trials_in

from .test_sweeps import FIVE, RECIPE

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["optuna", "primal_attention.training.sweeps"])


def study_in(folder):
    return open_study(folder / "study", RECIPE, FIVE, higher_is_better=True)


def work(folder, name):
    """Run trials that say when they begin and end; the first of the killed worker never ends."""

    def run(settings):
        (setting,) = settings
        with holding(folder / setting):
            began = folder / setting / f"began-{name}"
            began.touch()
            while name == "killed":
                time.sleep(0.01)
            time.sleep(0.1)
            with (folder / setting / "ends").open("a") as file:
                file.write(f"{name}\n")
        return float(setting.partition("=")[2])

    for eta in FIVE.choices["eta"]:
        (folder / f"eta={eta}").mkdir(exist_ok=True)
    run_trials(study_in(folder), FIVE, 5, run)


def test_the_trial_of_a_killed_worker_is_run_to_its_end_once(tmp_path):
    pytest.importorskip("optuna")
    study_in(tmp_path)
    killed, other = (
        PROCESSES.Process(target=work, args=(tmp_path, name)) for name in ("killed", "other")
    )
    killed.start()
    while not list(tmp_path.glob("*/began-killed")):
        time.sleep(0.01)
    other.start()
    while not list(tmp_path.glob("*/began-other")):
        time.sleep(0.01)
    killed.kill()
    other.join(60)
    assert (killed.exitcode, other.exitcode) == (-9, 0)
    ends = {path.parent.name: path.read_text().split() for path in tmp_path.glob("*/ends")}
    assert ends == {f"eta={eta}": ["other"] for eta in FIVE.choices["eta"]}
    done = trials_in(study_in(tmp_path), "COMPLETE")
    assert sorted(each.value for each in done) == sorted(FIVE.choices["eta"])
    assert not trials_in(study_in(tmp_path), "RUNNING")
