"""Where a run happens: Lightning Fabric with the devices, strategy and precision asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_fabric import Fabric

STRATEGIES = ("auto", "ddp", "fsdp")
_PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


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
    blocks over them.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    try:
        from lightning_fabric import Fabric
    except ModuleNotFoundError as error:
        message = "training needs Lightning Fabric: pip install 'primal-attention[train]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=_sharding() if strategy == "fsdp" else strategy,
        precision=_PRECISIONS[precision],
        loggers=loggers,
    )
    fabric.launch()
    return fabric


def mean_over_processes(fabric: Fabric, tensor: Tensor) -> Tensor:
    """The mean of a tensor over all processes."""
    mean = fabric.all_reduce(tensor, reduce_op="mean")
    assert isinstance(mean, Tensor)
    return mean


def _sharding() -> Any:
    """Each block of the encoder, then the rest, sharded over all processes."""
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(parallelize_fn=_shard, tensor_parallel_size=1)


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    from primal_attention.models import EncoderBlock

    for block in model.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model
