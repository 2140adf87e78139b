"""What can be asked of the devices."""

import subprocess
import sys

import pytest

from primal_attention.training import finish, launch

from .toy import one_process


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"strategy": "dp"}, "strategy must be one of auto, ddp, fsdp, got 'dp'"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"precision": "fp16", "strategy": "fsdp"}, "fsdp goes with precision fp32 or bf16"),
    ],
)
def test_what_there_is_not_is_told(settings, told):
    with pytest.raises(ValueError, match=told):
        launch(accelerator="cpu", devices=1, **settings)


@pytest.mark.filterwarnings("ignore:.*fp16 is not supported on CPU")
def test_fp16_needs_a_gpu():
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        launch("fp16", accelerator="cpu", devices=1)


def test_one_process_has_no_others_to_wait_for():
    fabric = one_process()
    assert (fabric.world_size, fabric.global_rank) == (1, 0)
    finish(fabric)
    finish(fabric)


def test_what_fabric_looks_at_alone_is_not_imported_with_it():
    """In a process of its own: torchmetrics would bring transformers and torchvision."""
    program = """
import sys
from primal_attention.training import launch
launch(accelerator="cpu", devices=1)
assert not {"torchmetrics", "transformers", "torchvision"} & set(sys.modules)
from torchmetrics import Metric
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
