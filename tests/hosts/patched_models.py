"""Every model that transformers builds is patched: a context, and a plugin of pytest around it.

``pytest -p patched_models`` with ``PRIMAL_LAYERS`` in the environment, ``-1`` or ``all``; without
it models stay as they come.
"""

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from primal_attention import patch
from primal_attention.patching.hosts import HOSTS
from primal_attention.patching.sites import patched_layers

LAYERS = {"-1": -1, "all": "all"}


@contextmanager
def every_model_patched(layers: int | str) -> Iterator[None]:
    """Patch whatever is built in the block, when it is built and before weights are loaded.

    A model within another is built, and so patched, first; the outer one is left as it is then.
    """
    build = PreTrainedModel.post_init

    def post_init(self: Any) -> None:
        build(self)
        known = any(host.owns(module) for module in self.modules() for host in HOSTS)
        if known and not patched_layers(self):
            patch(self, "primal", layers)

    PreTrainedModel.post_init = post_init
    try:
        yield
    finally:
        PreTrainedModel.post_init = build


def without_pipelines() -> None:
    """Leave out the tests of pipelines, which download models, and what they import."""
    stub = types.ModuleType("tests.test_pipeline_mixin")
    stub.PipelineTesterMixin = type("PipelineTesterMixin", (), {})  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub


def pytest_configure(config: Any) -> None:
    """Begin when pytest does."""
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
    without_pipelines()
    layers = os.environ.get("PRIMAL_LAYERS")
    if layers:
        patched = every_model_patched(LAYERS[layers])
        patched.__enter__()
        config.add_cleanup(lambda: patched.__exit__(None, None, None))
