"""Type checkers know the estimators, though they are assembled when they are first asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from primal_attention.timeseries import PrimalFormerClassifier, PrimalFormerRegressor

PrimalFormerRegressor(epochs=3).fit([[1.0]], [2.0]).predict([[1.0]])
reveal_type(PrimalFormerClassifier(epochs=3).fit([[1.0]], [2.0]))
PrimalFormerClassifier(epochz=3)
"""


def test_mypy_knows_parameters_and_methods(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert "Found 1 error" in done.stdout, done.stdout + done.stderr
    assert 'Unexpected keyword argument "epochz"' in done.stdout
    assert 'Revealed type is "primal_attention.timeseries.PrimalFormerClassifier"' in done.stdout
