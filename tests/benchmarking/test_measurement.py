"""One measurement: numbers where there are some, a reason where there are none."""

import gc

import pytest
import torch
from torch import nn

from primal_attention.attention import ATTENTIONS
from primal_attention.benchmarking.clocks import HostSynchronisationError, culprit
from primal_attention.benchmarking.layers import OpAlone
from primal_attention.benchmarking.measurement import measure, reason
from primal_attention.benchmarking.registry import ENTRIES, Entry, LayerSizes, find_entries

CPU = torch.device("cpu")
SIZES = LayerSizes(n=11, batch=3, dim=14, heads=2, directions=5, dtype="float32")
X = SIZES.n * SIZES.batch * SIZES.dim * 4  # bytes of an input


class Broken(nn.Module):
    """A layer that cannot do what it is asked to."""

    def __init__(self, error=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return ((x - x) / (x - x).detach() * self.scale,)


def broken(error=None):
    return Entry("broken", lambda entry, sizes, x: Broken(error))


@pytest.mark.parametrize("kind", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if not e.package])
def test_everything_that_is_here_can_be_timed(name, kind):
    made = measure(ENTRIES[name], SIZES, kind, CPU)
    assert made.note == ""
    assert made.wall_ms > 0
    assert made.gpu_ms is made.peak_mib is None  # of a GPU only


def test_the_registry_has_every_mechanism_in_all_forms():
    for name, kind in ATTENTIONS.items():
        forms = {entry.causal for entry in ENTRIES.values() if entry.mechanism == name}
        assert forms == ({False, True} if kind.mechanism.causal else {False})
    for name in ("projections", "released", "primal_op", "fla_linear"):
        assert find_entries([name])


def test_what_raises_is_told_with_its_place():
    made = measure(broken(ValueError("too odd\nby far")), SIZES, "fwd+bwd", CPU)
    assert made.wall_ms is made.moved is None
    assert made.note.startswith("ValueError in Broken.forward (test_measurement.py:")
    assert made.note.endswith(": too odd")


def test_out_of_memory_is_told():
    made = measure(broken(torch.OutOfMemoryError("tried to allocate ...")), SIZES, "fwd", CPU)
    assert made == (None, None, None, None, "out of memory")


def test_gradients_that_are_not_finite_are_told():
    assert "a gradient is not finite" in measure(broken(), SIZES, "fwd+bwd", CPU).note


def test_a_package_that_is_missing_is_told():
    absent = ENTRIES["fla_linear-causal"]._replace(package="no_such_package_here")
    assert measure(absent, SIZES, "fwd", CPU).note == "no_such_package_here is not installed"


def test_where_the_host_waits_is_named():
    def waits_for_a_value():
        raise HostSynchronisationError

    try:
        waits_for_a_value()
    except HostSynchronisationError as error:
        assert "waits_for_a_value (test_measurement.py:" in culprit(error)
        assert reason(HostSynchronisationError("host synchronisation in f")).endswith("in f")


def test_the_floor_moves_each_of_its_tensors_once():
    weights = 4 * (3 * SIZES.dim**2 + 3 * SIZES.dim)
    forward = measure(ENTRIES["projections"], SIZES, "fwd", CPU).moved
    both = measure(ENTRIES["projections"], SIZES, "fwd+bwd", CPU).moved
    assert forward == 5 * X + weights  # two inputs, q, k and y
    assert both - forward == 7 * X + 2 * weights  # the inputs, all gradients


def test_the_op_reads_and_writes_what_its_formula_has():
    C = SIZES.dim // SIZES.heads
    small = 4 * SIZES.batch * SIZES.heads * 2 * C**2  # both of a, or both Gram matrices
    forward = measure(ENTRIES["primal_op-sampled"], SIZES, "fwd", CPU).moved
    backward = measure(ENTRIES["primal_op-sampled"], SIZES, "bwd", CPU).moved
    assert forward == 3 * X + 2 * small + 4 * C
    assert backward == 5 * X + 3 * small + 8 * C


def test_the_op_reads_halves_of_one_projection():
    op = OpAlone(SIZES.input(CPU), SIZES.heads, shared=True)
    assert op.q.untyped_storage().data_ptr() == op.k.untyped_storage().data_ptr()
    assert op.q.is_leaf and op.q.requires_grad and not op.q.is_contiguous()


def test_a_mechanism_stands_for_its_forms():
    assert find_entries(["softmax"]) == ["softmax", "softmax-causal"]
    assert find_entries(["primal-dual", "primal"])[0] == "primal-dual"
    with pytest.raises(ValueError, match="'sofmax' can be timed; near: softmax"):
        find_entries(["sofmax"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["projections", "softmax", "primal-sampled", "primal_op-static"])
def test_on_a_gpu_all_clocks_run(name):
    made = measure(ENTRIES[name], SIZES, "fwd", torch.device("cuda"))
    assert made.note == ""
    assert 0 < made.gpu_ms < made.wall_ms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_released_arithmetic_waits_and_is_named():
    made = measure(ENTRIES["released-sampled"], SIZES, "fwd+bwd", torch.device("cuda"))
    assert made.gpu_ms is None
    assert made.wall_ms > 0
    assert made.note.startswith("host synchronisation in ReleasedArithmetic.attend (layers.py:")


def test_what_is_not_replayed_has_no_time_of_the_gpu_alone():
    made = measure(ENTRIES["softmax"], SIZES, "fwd", CPU, replayed=False)
    assert made.gpu_ms is None
    assert made.wall_ms > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_graph_of_an_earlier_measurement_does_not_end_a_recording():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(3, device="cuda")
    garbage = [graph]
    garbage.append(garbage)  # only the collector finds it
    gc.disable()
    del graph, garbage
    gc.enable()
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        made = measure(ENTRIES["primal-sampled"], SIZES, "fwd+bwd", torch.device("cuda"))
    finally:
        gc.set_threshold(*before)
    assert made.note == ""
