"""Processes that run a program together: forked from one that has imported what takes seconds."""

import importlib.util
import itertools
import multiprocessing
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "primal_attention.distributed.checkpoint",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.nn.parallel.distributed",
        "transformers.models.bert.modeling_bert",
    ]
)
LIMIT = 120


def work(rank, size, folder, store, program, arguments):
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    try:
        spec = importlib.util.spec_from_file_location(program, PROGRAMS / f"{program}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
        module.main(mesh, *arguments)
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        sys.exit(1)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture
def together(tmp_path):
    """Run a program in so many processes; its error is that of the test."""

    stores = itertools.count()

    def run(program, size, *arguments):
        store = next(stores)
        processes = [
            PROCESSES.Process(target=work, args=(rank, size, tmp_path, store, program, arguments))
            for rank in range(size)
        ]
        for each in processes:
            each.start()
        for each in processes:
            each.join(LIMIT)
        errors = [path.read_text() for path in sorted(tmp_path.glob("error*"))]
        for each in processes:
            each.kill()
        assert not errors, errors[0]
        assert [each.exitcode for each in processes] == [0] * size

    return run
