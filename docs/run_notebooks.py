"""Execute the notebooks and write them back with their outputs: `make notebooks`.

    python docs/run_notebooks.py [docs/notebooks/spectra.ipynb ...]

A notebook that fails stays as it was.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent / "notebooks"
KEPT = {  # nothing of the machine that they ran on
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

SETTINGS = {  # of the kernel
    "OMP_NUM_THREADS": "1",  # networks so small gain nothing from more
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # there is no browser to show one
}


def main() -> None:
    os.environ.update(SETTINGS)
    for path in [Path(name) for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.perf_counter()
        execute(path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s, {path.stat().st_size:,} bytes")


def execute(path: Path) -> None:
    """Run a notebook from its first cell to the last, in a folder that is empty."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()
    notebook.metadata = nbformat.from_dict(KEPT)
    whole = path.with_suffix(".unfinished")
    nbformat.write(notebook, whole)
    whole.replace(path)


if __name__ == "__main__":
    main()
