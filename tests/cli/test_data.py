"""`primal data`: what is there, and preparing it."""

from primal_attention.tasks import UEA_SETS

from .command import primal, told


def test_sets_are_listed_with_their_places(tmp_path):
    result = primal("data")
    assert result.exit_code == 0
    places = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[: len(UEA_SETS)])
    assert places.keys() == {f"uea/{name}" for name in UEA_SETS}
    assert "aeon" in places["uea/BasicMotions"]
    assert places["uea/Heartbeat"] == "not at hand"


def test_mistakes_are_named(tmp_path):
    assert "did you mean uea?" in told(primal("data", "eua"))
    result = primal("data", "language", "wikitext")
    assert result.exit_code == 2
    assert "did you mean one of wikitext-2" in told(result)
    assert "not prepared" in told(primal("data", "uea", "BasicMotions"))
    assert not list(tmp_path.rglob("*.npz"))
