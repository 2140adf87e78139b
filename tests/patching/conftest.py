"""The same random numbers for every test, and the libraries as quiet as they can be."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()
