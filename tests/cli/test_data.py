"""`primal data`: what is there, and preparing it."""

from primal_attention.tasks import UEA_SETS, load_uea

from .command import primal, told


def test_sets_are_listed_with_their_places(tmp_path):
    result = primal("data")
    assert result.exit_code == 0
    places = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[: len(UEA_SETS)])
    assert places.keys() == {f"uea/{name}" for name in UEA_SETS}
    assert "aeon" in places["uea/BasicMotions"]
    assert places["uea/Heartbeat"] == "to be downloaded"


def test_a_prepared_set_is_found_and_the_same(tmp_path):
    result = primal("data", "uea", "BasicMotions", "--out", "prepared")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "prepared/BasicMotions.npz"
    listed = primal("data", "--folder", "prepared")
    assert "prepared/BasicMotions.npz" in listed.stdout
    (train, test), (train2, test2) = (
        load_uea("BasicMotions", folder) for folder in (None, tmp_path / "prepared")
    )
    assert len(train.series) == len(train2.series)
    assert all((a == b).all() for a, b in zip(test.series, test2.series, strict=True))


def test_mistakes_are_named(tmp_path):
    assert "did you mean uea?" in told(primal("data", "eua"))
    result = primal("data", "uea", "BasicMotion")
    assert result.exit_code == 2
    assert "did you mean one of BasicMotions" in told(result)
    assert not list(tmp_path.rglob("*.npz"))
