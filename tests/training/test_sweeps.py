"""Studies: every setting is tried once, whoever runs it and whatever is interrupted."""

import pytest

from primal_attention.atomic_files import HeldError
from primal_attention.training import find_recipe
from primal_attention.training.sweeps import (
    PAPER_GRID,
    Space,
    as_settings,
    open_study,
    run_trials,
    space_of,
    trials_in,
)

RECIPE = find_recipe("uea/Heartbeat", "primalformer", "clean")
GRID = space_of("grid", "primalformer")
FIVE = Space({"eta": (0.1, 0.2, 0.5, 0.7, 0.9)}, {})


@pytest.fixture(autouse=True)
def quiet():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def study(tmp_path):
    def opened(space=FIVE, recipe=RECIPE):
        return open_study(tmp_path / "new" / "s", recipe, space, higher_is_better=True)

    return opened


class Runs:
    """Remembers what was run; the value is that of eta."""

    def __init__(self, stop_at=None, error=KeyboardInterrupt):
        self.seen, self.stop_at, self.error = [], stop_at, error

    def __call__(self, settings):
        if len(self.seen) == self.stop_at:
            raise self.error
        self.seen.append(tuple(settings))
        return float(dict(each.split("=") for each in settings)["eta"])


def test_the_grid_is_that_of_the_paper(study):
    runs = Runs()
    run_trials(study(GRID), GRID, 100, runs)
    settings = set(runs.seen)
    assert len(settings) == len(runs.seen) == 9
    assert {RECIPE.with_settings(each).optim.eta for each in settings} == set(PAPER_GRID["eta"])
    assert {RECIPE.with_settings(each).model.attention["num_directions"] for each in settings} == {
        *PAPER_GRID["attention.num_directions"]
    }
    assert study(GRID).best_trial.params["eta"] == 0.5


def test_finished_trials_are_not_repeated(study):
    first, second = Runs(), Runs()
    run_trials(study(), FIVE, 2, first)
    run_trials(study(), FIVE, 5, second)
    assert (len(first.seen), len(second.seen)) == (2, 3)
    assert not set(first.seen) & set(second.seen)


def test_processes_share_a_study(study):
    """Another process runs trials in the middle of one of ours."""
    ours, theirs = Runs(), Runs()

    def run(settings):
        if not ours.seen:
            run_trials(study(), FIVE, 3, others(settings))
        return ours(settings)

    def others(held):
        def run(settings):
            if tuple(settings) == tuple(held):
                raise HeldError("another process trains there")
            return theirs(settings)

        return run

    run_trials(study(), FIVE, 5, run)
    assert len(theirs.seen) == 2
    assert len(set(ours.seen + theirs.seen)) == len(ours.seen + theirs.seen) == 5
    assert len(trials_in(study(), "COMPLETE")) == 5


def test_points_that_two_processes_enqueued_are_counted_once(study):
    opened = study()
    for eta in (0.1, 0.2):
        opened.enqueue_trial({"eta": eta})
    runs = Runs()
    run_trials(opened, FIVE, 5, runs)
    assert len(set(runs.seen)) == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_trial_is_taken_up_again(study, error):
    runs = Runs(stop_at=2, error=error)
    with pytest.raises(error):
        run_trials(study(), FIVE, 5, runs)
    rest = Runs()
    run_trials(study(), FIVE, 5, rest)
    assert len(rest.seen) == 3
    assert rest.seen[0] == tuple(as_settings(FIVE.grid[2]))
    assert len(set(runs.seen + rest.seen)) == len(trials_in(study(), "COMPLETE")) == 5


def test_the_trial_of_a_killed_process_is_taken_over(study):
    killed = study().ask()
    settings = FIVE.suggest(killed)
    study().ask()  # killed before it had settings
    runs = Runs()
    run_trials(study(), FIVE, 5, runs)
    assert runs.seen[0] == tuple(settings)
    assert len(set(runs.seen)) == 5


def test_a_trial_whose_loss_is_no_number_is_given_up(study):
    runs = Runs(stop_at=0, error=FloatingPointError("the loss is nan"))
    run_trials(study(), FIVE, 5, runs)
    assert trials_in(study(), "COMPLETE") == []


def test_a_free_search_stays_in_its_ranges(study):
    space = space_of("tpe", "primalformer")
    seen = []

    def run(settings):
        recipe = RECIPE.with_settings(settings)
        seen.append(recipe)
        return -abs(recipe.optim.lr - 1e-3)

    run_trials(study(space), space, 5, run)
    run_trials(study(space), space, 7, run)
    assert len(seen) == 7
    assert all(1e-4 <= each.optim.lr <= 5e-3 and 0 <= each.model.dropout <= 0.5 for each in seen)
    names = {"num_directions", "landmark_dropout", "landmark_jitter", "samples_per_direction"}
    assert all(each.model.attention.keys() == names for each in seen)
    assert len({each.optim.lr for each in seen}) == 7


def test_models_without_directions_have_a_smaller_space():
    space = space_of("tpe", "softmax")
    assert {*space.choices, *space.ranges} == {"lr", "dropout", "pooling"}
    with pytest.raises(ValueError, match="softmax does not have; use --sampler tpe"):
        space_of("grid", "softmax")
    with pytest.raises(ValueError, match="sampler must be one of grid, tpe, got 'x'"):
        space_of("x", "softmax")


def test_a_study_is_about_one_recipe(study):
    study()
    with pytest.raises(ValueError, match=r"about other settings \(lr=0\.001\)"):
        study(recipe=RECIPE.with_settings(["lr=0.5"]))
    with pytest.raises(ValueError, match="about other settings"):
        study(space_of("tpe", "primalformer"))
