"""Where a run happens: Lightning Fabric with the devices, strategy and precision asked for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from primal_attention.extras import needing

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Found = TypeVar("Found")
_LOOK = 0.5  # seconds between two looks at the process that started this one
_WIND_DOWN = 10.0  # seconds that a process has to end after it said that another one is gone
_told = threading.Lock()  # held by the thread that says it: one line a process
_SIGNS_OF_A_LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "gloo", "timed out")
STRATEGIES = ("auto", "ddp", "fsdp")
PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class LostPeerError(ConnectionError):
    """Another process of the run is gone, so this one cannot go on."""


def launch(
    precision: str = "fp32",
    *,
    accelerator: str = "auto",
    devices: int | str = "auto",
    num_nodes: int = 1,
    strategy: str = "auto",
    loggers: Any = None,
) -> Fabric:
    """Processes on the devices, ready to train; under ``torchrun`` those that it started.

    One device means one process. ``ddp`` copies the model to every process, ``fsdp`` shards its
    blocks over them. A program that may have several processes ends with ``finish``.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if (strategy, precision) == ("fsdp", "fp16"):
        raise ValueError("fsdp goes with precision fp32 or bf16, got 'fp16'")
    with needing("training needs Lightning Fabric", "train"), _version_alone("torchmetrics"):
        from lightning_fabric import Fabric
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=_sharding() if strategy == "fsdp" else strategy,
        precision=PRECISIONS[precision],
        loggers=loggers,
    )
    if precision == "fp16" and fabric.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU; bf16 and fp32 do not")
    fabric.launch()
    started_here = "TORCHELASTIC_RUN_ID" in os.environ or fabric.local_rank > 0
    if fabric.world_size > 1 and started_here:
        _watch_launcher()
    return fabric


@contextmanager
def _version_alone(package: str) -> Iterator[None]:
    """Importing the package gives its version and nothing else.

    Lightning Fabric imports torchmetrics to compare its version, and torchmetrics imports
    transformers and torchvision where they are installed: seconds before the first step.
    """
    stand_in = ModuleType(package)
    try:
        stand_in.__dict__["__version__"] = metadata.version(package)
    except metadata.PackageNotFoundError:
        yield
        return
    found = sys.modules.setdefault(package, stand_in)
    try:
        yield
    finally:
        if found is stand_in:
            del sys.modules[package]


def _watch_launcher() -> None:
    """End this process once the one that started it is gone: torchrun, or the first process.

    A process that waits for others would not notice by itself.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        if _told.acquire(blocking=False):
            sys.stderr.write(f"Error: process {parent}, which started this one, is gone\n")
            sys.stderr.flush()
        else:
            time.sleep(_WIND_DOWN)
        os._exit(1)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


@contextmanager
def with_peers(fabric: Fabric) -> Iterator[None]:
    """Say in one error of ours that another process is gone, or that it is silent.

    Raises:
        LostPeerError: It is.
    """
    try:
        yield
    except RuntimeError as error:
        if fabric.world_size == 1 or not _is_lost_peer(error):
            raise
        _told.acquire(timeout=1)  # while the watching thread holds it, this process ends
        rank, size = fabric.global_rank, fabric.world_size
        told = f"process {rank + 1} of {size} lost another one, which was ended or is unreachable"
        raise LostPeerError(told) from error


def _is_lost_peer(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)


def finish(fabric: Fabric) -> None:
    """Let go of the other processes once all are here; the last thing that a program does."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        fabric.barrier()
        distributed.destroy_process_group()


def check_precision(fabric: Fabric, precision: str) -> None:
    """Raise unless the processes were launched with that precision."""
    found = fabric.strategy.precision.precision
    if found != PRECISIONS[precision]:
        raise ValueError(
            f"the recipe has precision={precision!r}, the processes were launched with {found!r}; "
            f"launch them with launch({precision!r})"
        )


def from_first(fabric: Fabric, make: Callable[[], Found]) -> Found:
    """Run a function in the first process; return its value, or raise its error, in all."""
    found: Found | None = None
    error: Exception | None = None
    if fabric.is_global_zero:
        try:
            found = make()
        except Exception as raised:
            if fabric.world_size == 1:
                raise
            error = raised
    found, error = fabric.broadcast((found, error))
    if error is not None:
        raise error
    return cast(Found, found)


def mean_over_processes(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Average a tensor over all processes."""
    mean = fabric.all_reduce(tensor, reduce_op="mean")
    assert isinstance(mean, Tensor)
    return mean


def device_name(device: torch.device) -> str:
    """Return the name of the card, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _sharding() -> Any:
    """Shard each block of the encoder, then the rest, over all processes.

    Fabric's own FSDP strategy refuses processors; this one takes any function that shards.
    """
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(parallelize_fn=_shard)


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from primal_attention.models import EncoderBlock

    all_processes = init_device_mesh(mesh.device_type, (mesh.size(),))
    for block in model.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=all_processes)
    fully_shard(model, mesh=all_processes)
    return model
