"""Launches of the same kinds of arguments take the same compiled form, and no others do."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402 - needs triton

from primal_attention.ops.replay import PassPlan, Recording  # noqa: E402 - after triton
from primal_attention.ops.triton import launch  # noqa: E402 - needs triton


class Compiled:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))

    function, packed_metadata = "function", "metadata"

    def run(self, *arguments):
        self.launches.append(arguments)


class Function:
    """As much of a Triton function as launching needs."""

    def __init__(self, *, compiles=True):
        self.compiles, self.calls, self.compiled = compiles, [], []

    @staticmethod
    def fn(x, y, strides, N, WIDTH, BLOCK):
        """Its parameters."""

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append((grid, arguments, options))
            if not self.compiles:
                return None
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


class Driver:
    device = 0

    def get_current_device(self):
        return self.device


@pytest.fixture
def device(monkeypatch):
    active = Driver()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return active


def rows(dtype=torch.float32, *, offset=0):
    return torch.empty(64, dtype=dtype)[offset:]


def descriptor(dtype=torch.float32, *, tokens=4, block=2):
    return TensorDescriptor(rows(dtype), [tokens, 16], [16, 1], [block, 16])


ARGUMENTS = (None, (8, 1), 17, 16, 32)


@pytest.mark.usefixtures("device")
def test_the_same_kinds_are_compiled_once():
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    launched[(5,)](rows(), *ARGUMENTS, num_warps=4)
    tensors = [rows(), torch.nn.Parameter(rows()), rows(offset=4)]
    for each in tensors:
        launched[7, 3](each, *ARGUMENTS, num_warps=4)
    assert len(function.calls) == 1
    (compiled,) = function.compiled
    assert [grid for grid, _ in compiled.launches] == [(7, 3, 1)] * 3
    for (_, arguments), tensor in zip(compiled.launches, tensors, strict=True):
        assert arguments[0] is tensor
        assert arguments[1:] == ARGUMENTS


@pytest.mark.usefixtures("device")
def test_named_arguments_take_their_places():
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    for _ in range(2):
        launched[1, 2, 3](rows(), None, (8, 1), 17, BLOCK=32, num_warps=4, WIDTH=16)
    ((grid, arguments),) = function.compiled[0].launches
    assert grid == (1, 2, 3)
    assert arguments[1:] == ARGUMENTS


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "other",
    [
        {"x": rows(torch.bfloat16)},
        {"x": rows(offset=1)},
        {"y": rows()},
        {"strides": (8, 2)},
        {"N": 16},
        {"WIDTH": 32},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_kind_is_compiled_apart(other):
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    given = dict(zip(launched.names, (rows(), *ARGUMENTS), strict=True)) | {"num_warps": 4}
    launched[(1,)](**given)
    launched[(1,)](**(given | other))
    assert len(function.calls) == 2


@pytest.mark.usefixtures("device")
def test_descriptors_of_the_same_blocks_are_of_one_kind():
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    for tokens in (4, 3):
        launched[(1,)](descriptor(tokens=tokens), *ARGUMENTS)
    assert len(function.calls) == 1
    for other in (descriptor(block=4), descriptor(torch.bfloat16), rows()):
        launched[(1,)](other, *ARGUMENTS)
    assert len(function.calls) == 4


@pytest.mark.usefixtures("device")
def test_no_memory_is_kept():
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    x, y = rows(), descriptor()
    tensors = [weakref.ref(x), weakref.ref(y.base)]
    launched[(1,)](x, y, *ARGUMENTS[1:])
    function.calls.clear()
    del x, y
    gc.collect()
    assert [each() for each in tensors] == [None, None]


def test_each_device_has_its_own(device):
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    for device.device in (0, 1, 0, 1):
        launched[(1,)](rows(), *ARGUMENTS)
    assert len(function.calls) == 2
    assert [len(each.launches) for each in function.compiled] == [1, 1]


@pytest.mark.usefixtures("device")
def test_what_is_not_compiled_is_left_to_triton():
    function = Function(compiles=False)
    launched = launch.Launcher(function, compiles=False)
    for _ in range(3):
        launched[(1,)](rows(), *ARGUMENTS)
    assert len(function.calls) == 3


@pytest.mark.usefixtures("device")
def test_only_so_many_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 3)
    launched = launch.Launcher(Function(), compiles=True)
    for N in range(10):
        launched[(1,)](rows(), None, (8, 1), N, 16, 32)
        assert len(launched.compiled) <= 3


@pytest.mark.usefixtures("device")
def test_a_recorded_launch_takes_addresses():
    """Those of the tensors of each call, at the same places of their buffers."""
    function = Function()
    launched = launch.Launcher(function, compiles=True)
    x = rows()
    with Recording([x]) as recording:
        [alias] = recording.inputs
        launched[(5,)](alias[8:], *ARGUMENTS, num_warps=4)
        plan = PassPlan(recording, [alias])
    compiled = function.compiled[0]
    compiled.launches.clear()
    y = rows()
    assert plan([y])[0] is y
    assert compiled.launches == [
        (5, 1, 1, 0, "function", "metadata", None, None, None, y.data_ptr() + 32, *ARGUMENTS)
    ]


@triton.jit
def interpreted():
    """Nothing."""


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="compiles for the GPU")
def test_the_interpreter_compiles_nothing():
    launched = launch.Launcher(interpreted)
    launched[(1,)]()
    assert not launched.compiled
