"""A pytest plugin under which every model that transformers builds is patched.

``PRIMAL_LAYERS`` says which layers: ``-1``, ``all``, or nothing for models as they come.
"""

import os
import sys
import types

import pytest
from transformers.modeling_utils import PreTrainedModel

from primal_attention import patch
from primal_attention.patching.sites import HOSTS, patched_layers

LAYERS = {"": None, "-1": -1, "all": "all"}[os.environ.get("PRIMAL_LAYERS", "")]

_post_init = PreTrainedModel.post_init


def _known(model):
    return any(host.owns(module) for host in HOSTS for module in model.modules())


def post_init(self):
    if _known(self) and not patched_layers(self):
        patch(self, "primal", LAYERS)
    _post_init(self)


if LAYERS is not None:
    PreTrainedModel.post_init = post_init

stub = types.ModuleType("tests.test_pipeline_mixin")
stub.PipelineTesterMixin = type("PipelineTesterMixin", (), {})
sys.modules[stub.__name__] = stub


def pytest_configure(config):
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
