"""Train a step on one sequence of 1,000,000 tokens in 1, 2 and 4 processes; peak memory of each.

    python benchmarks/context.py [--tokens 1000000] [--processes 1 2 4]

Peak memory is that of a process above its own before the model exists.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

DIM, HEADS, DIRECTIONS, LAYERS = 16, 2, 4, 1
FORMS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "learned time": {"weights": "dual", "decay": "learned", "score_norm": True},
    "causal dual": {"weights": "dual", "causal": True},
}


def work(rank: int, size: int, tokens: int, form: str, folder: str) -> None:
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    from primal_attention import PrimalAttention, ksvd_loss
    from primal_attention.distributed import shard_context
    from primal_attention.models import Encoder
    from primal_attention.ops.op import chunk_elements

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    layers = [PrimalAttention(DIM, HEADS, DIRECTIONS, **FORMS[form]) for _ in range(LAYERS)]
    model = Encoder(layers, DIM, 2 * DIM)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
    shard_context(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before, began = _peak(), time.monotonic()
    own = [tokens // size + (i < tokens % size) for i in range(size)][rank]
    generator = torch.Generator().manual_seed(rank)
    with chunk_elements(2**20):  # eager forms walk over the tokens in chunks of about so many
        y = model(torch.randn(1, own, DIM, generator=generator))
        loss = y.square().mean() * own * size / tokens + 0.1 * ksvd_loss(model)
        loss.backward()
    optimizer.step()
    row = {"process": rank, "mib": _peak() - before, "seconds": time.monotonic() - began}
    Path(folder, f"row{rank}").write_text(json.dumps(row))
    distributed.barrier()
    distributed.destroy_process_group()


def _peak() -> float:
    """Return the peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(size: int, tokens: int, form: str) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(rank, size, tokens, form, folder))
            for rank in range(size)
        ]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("row*"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    print("| form | processes | peak MiB of each | seconds |\n|---|---|---|---|")
    for form in FORMS:
        for size in options.processes:
            rows = measured(size, options.tokens, form)
            peaks = ", ".join(f"{row['mib']:,.0f}" for row in rows)
            print(f"| {form} | {size} | {peaks} | {max(row['seconds'] for row in rows):.0f} |")


if __name__ == "__main__":
    main()
