import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The tensors are too small to share; several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
