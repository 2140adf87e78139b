"""The tests that transformers has for its own models, with every model patched.

    git clone --depth 1 https://github.com/huggingface/transformers
    pip install parameterized
    python tests/hosts/transformers_tests.py transformers

runs the common tests of BERT, GPT-2, Llama and ViT from that source tree against the transformers
that is installed, once with the last layer patched and once with all layers, then those of
PrimalFormer's own classes (``--layers own``), and prints the tests that fail by their cause. It
ends with 1 if one fails of which no reason is known. Take the source of the version that is
installed, or one next to it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from reasons import REASONS

HERE = Path(__file__).parent
MODELS = ("bert", "gpt2", "llama", "vit")
LAYERS = ("-1", "all", "own")


class Failure(NamedTuple):
    """A test that fails, with the first of its messages."""

    model: str
    test: str
    message: str

    @property
    def reason(self) -> str | None:
        """Why it cannot pass; None where that is not known."""
        for reason in REASONS:
            if re.fullmatch(reason.tests, self.test) and re.search(reason.message, self.message):
                return reason.why
        return None


def main() -> int:
    """Run, and report."""
    arguments = _arguments()
    common = arguments.source / "tests" / "test_modeling_common.py"
    if not common.is_file():
        sys.exit(f"{arguments.source} is no source tree of transformers: {common} is missing")
    unknown = 0
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            output = _run(arguments.source, arguments.models, layers, arguments.k, report)
            if not report.is_file():
                sys.exit(f"pytest ended without a report:\n{output}")
            tests = ElementTree.parse(report).getroot()
        failures = sorted(set(_failures(tests)))
        sys.stdout.write(_text(layers, failures, tests) + "\n")
        unknown += sum(failure.reason is None for failure in failures)
    return 1 if unknown else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="source tree of transformers")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=(*LAYERS, "none"),
        default=LAYERS,
        help="which to patch; none, or PrimalFormer",
    )
    parser.add_argument("-k", default="", help="tests to run, an expression of pytest")
    return parser.parse_args()


def _run(source: Path, models: list[str], layers: str, expression: str, report: Path) -> str:
    """Run the tests in a process of their own; what it printed last."""
    files = [f"tests/models/{model}/test_modeling_{model}.py" for model in models]
    if layers == "own":
        files = [str(HERE / "primalformer_common.py")]
    options = ["-p", "patched_models", "--noconftest", "-c", os.devnull, "--rootdir", "."]
    options += ["-p", "no:cacheprovider", "-q", "--tb=line", f"--junitxml={report}"]
    if expression:
        options += ["-k", expression]
    paths = [HERE, HERE.parents[1], source.resolve(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PRIMAL_LAYERS": "" if layers in ("none", "own") else layers,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr)[-2000:]


def _failures(tests: ElementTree.Element) -> Iterator[Failure]:
    """The tests that failed; one that failed in several of its parts counts once."""
    messages: dict[tuple[str, str], str] = {}
    for case in tests.iter("testcase"):
        for outcome in case:
            if outcome.tag in ("failure", "error"):
                model = re.search(r"models\.(\w+)\.", case.get("classname") or "")
                key = (model[1] if model else "", (case.get("name") or "").partition("[")[0])
                messages.setdefault(key, (outcome.get("message") or outcome.text or "").strip())
    for (model, test), message in messages.items():
        yield Failure(model, test, message)


def _text(layers: str, failures: list[Failure], tests: ElementTree.Element) -> str:
    """The failures by cause."""
    names = {
        (case.get("classname"), (case.get("name") or "").partition("[")[0])
        for case in tests.iter("testcase")
    }
    lines = [f"layers {layers}: {len(failures)} of {len(names)} tests fail"]
    causes = defaultdict(list)
    for failure in failures:
        cause = failure.reason or f"NOT KNOWN: {failure.message.splitlines()[0][:200]}"
        causes[cause].append(failure)
    for cause, found in sorted(causes.items(), key=lambda each: -len(each[1])):
        lines.append(f"  {len(found):2d}  {cause}")
        lines += [f"        {failure.model}: {failure.test}" for failure in found]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
