"""`primal` on offline reinforcement learning: trained, rolled out, in a table."""

import importlib.util
from pathlib import Path

from primal_attention.tasks.offline_rl import RL
from primal_attention.training.results import add_rows, read_rows

from .command import primal, sets, told

REPRODUCTION = Path(__file__).parents[2] / "reproduction"
SMALL = ["dim=8", "num_heads=2", "ffn_dim=13", "num_tokens=9", "batch_size=10", "steps=6"]
SETTINGS = [*SMALL, "eval_every=3", "attention.num_directions=3"]
TASK = "rl/hopper-medium"


def made(tmp_path):
    """The trajectories of the tests of the tasks, as a set."""
    path = Path(__file__).parents[1] / "tasks" / "toy_rl.py"
    spec = importlib.util.spec_from_file_location("toy_rl", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    RL.write(tmp_path / "data" / "rl" / "hopper-medium.npz", module.trajectories())


def train(*arguments):
    options = ["--model", "primal_plus", "--quiet", "--accelerator", "cpu"]
    return primal("train", TASK, *options, *sets(*SETTINGS), *arguments)


def test_from_trajectories_to_a_table(tmp_path):
    made(tmp_path)
    places = dict(
        line.split(maxsplit=1) for line in primal("data").stdout.splitlines() if "rl/" in line
    )
    assert places[TASK].endswith("hopper-medium.npz")
    assert places["rl/walker2d-medium"] == "not at hand"

    result = train()
    assert result.exit_code == 0, result.output
    (run,) = (tmp_path / "runs" / TASK / "primal_plus" / "clean").iterdir()
    rolled = primal("rollout", run, "--episodes", 2)
    assert rolled.exit_code == 0, rolled.output
    rows = read_rows(tmp_path / "runs" / "rollouts.csv")
    assert {row["selection"] for row in rows} == {"last", "best"}
    assert all(f"score {float(row['value']):.1f}" in told(rolled) for row in rows)
    again = primal("rollout", run, "--episodes", 2)
    assert (again.exit_code, again.stdout) == (0, "")
    by_state = primal("rollout", run, "--episodes", 1, "--mode", "state", "--target", 1800)
    assert by_state.exit_code == 0, by_state.output
    assert "last, state, target 1800" in told(by_state)

    values = {"last": "55.5", "best": "77.7"}
    changed = [row | {"value": values[row["selection"]]} for row in rows]
    add_rows(tmp_path / "both.csv", changed)
    table = primal(
        *("table", "d4rl", "--folder", REPRODUCTION, "--results", "both.csv"),
        *sets(*SETTINGS),
    )
    assert table.exit_code == 0, table.output
    assert "D4RL-like data" in told(table)
    assert "55.5" in table.stdout
    assert "77.7" not in table.stdout  # of the best checkpoint

    refused = primal("evaluate", run)
    assert refused.exit_code == 2
    assert "primal rollout measures it" in told(refused)


def test_mistakes_are_named_and_leave_nothing(tmp_path):
    no_data = train()
    assert no_data.exit_code == 2
    assert "make_sets.py" in told(no_data)
    nothing = primal("rollout", tmp_path / "none")
    assert nothing.exit_code == 2
    assert "no checkpoint" in told(nothing)
    for wrong in (["--mode", "windows"], ["--version", 3], ["--accelerator", "tpus"]):
        assert primal("rollout", tmp_path, *wrong).exit_code == 2
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "data").exists()
