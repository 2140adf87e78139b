"""The replay of a step: what must not happen while it is recorded."""

import gc
import weakref

import pytest
import torch

from primal_attention.training.step import Replayed, garbage_kept


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self, kept=None):
        self.kept, self.myself = kept, self


@pytest.fixture
def eager_collector():
    """A collector that runs at nearly every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_before_and_not_inside(eager_collector):
    gc.disable()
    old = weakref.ref(Loop())
    gc.enable()
    with garbage_kept():
        assert old() is None
        new = weakref.ref(Loop())
        made = [Loop() for _ in range(20)]
        assert new() is not None
    assert gc.isenabled()
    del made


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_inside_leaves_the_collector_on():
    with pytest.raises(ZeroDivisionError), garbage_kept():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graph_of_an_earlier_run_does_not_end_a_recording(eager_collector):
    def steps(number):
        x = torch.zeros(5, device="cuda")

        def update(indices, share):
            garbage = [Loop() for _ in range(10)]
            x.add_(torch.ones_like(x) * len(garbage))
            return x.sum() * share

        replayed = Replayed(update)
        for _ in range(number):
            replayed(torch.arange(3, device="cuda"), 1.0)
        return replayed, float(x[0])

    gc.disable()
    Loop(steps(6)[0])  # its graph is garbage from here on
    gc.enable()
    assert steps(7)[1] == 70
