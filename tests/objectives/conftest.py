import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny: threads that wait for each other only cost time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
