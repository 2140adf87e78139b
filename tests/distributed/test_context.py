"""Layers and models whose sequences are sharded over processes."""

import pytest


@pytest.mark.parametrize("size", [2, 4])
def test_shards_compute_what_one_process_does(together, size):
    together("forms", size)


def test_models_compute_what_one_process_does(together):
    together("models", 2)


def test_bytes_do_not_depend_on_the_number_of_tokens(together):
    together("messages", 2)
