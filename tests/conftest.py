"""One thread: the tensors of the tests are small, and more threads would wait for each other.

So it is in processes that tests start. Fused ops run in Triton's interpreter where there is no
GPU; Triton asks when it is imported.
"""

import gc
import os

import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PRIMAL_FUSED", None)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish():
    """Thousands of collected tests need not be searched for garbage while graphs are traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
