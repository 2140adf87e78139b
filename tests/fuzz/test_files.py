"""A few of the cases of ``files.py``; by hand it runs thousands."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("files.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="its limits are those of Linux")
def test_mutated_files_are_refused_with_their_names():
    command = [sys.executable, str(SCRIPT), "--cases", "60", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all: {" in done.stdout
