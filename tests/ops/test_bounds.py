"""Whether an address beside a tensor is noticed."""

import pytest
import torch

from .fused import INTERPRETED, triton

tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402 - needs triton

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="checks the interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@triton.jit
def copy(source, target, shift_read, shift_write, number, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    values = tl.load(source + shift_read + n, mask=n < number)
    tl.store(target + shift_write + n, values, mask=n < number)


@triton.jit
def copy_one(tensors, shift):
    tl.store(tensors[1], tl.load(tensors[0] + shift))


@triton.jit
def copy_block(source, target, row):
    n = tl.arange(0, 16)
    tl.store(target + n, tl.reshape(source.load([row, 0]), [16]))


def copied(read=0, write=0, number=5, dtype=torch.float32):
    """From the middle of a tensor to the middle of one; what lies between them is no one's."""
    memory = torch.zeros(64, dtype=dtype)
    source, target = memory[8:13], memory[30:35]
    source.copy_(torch.arange(1, 6))
    copy[(1,)](source, target, read, write, number, 8)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_inside(dtype):
    assert copied(dtype=dtype).tolist() == [1, 2, 3, 4, 5]


def test_what_is_masked_may_be_anywhere():
    assert copied(read=1 << 20, number=0).tolist() == [0] * 5


@pytest.mark.parametrize("shift", [-1, 1, 5, -(1 << 40), 1 << 40])
@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside(what, shift, dtype):
    with pytest.raises(interpreter.InterpreterError, match=f"{what}s . elements outside"):
        copied(**{what: shift}, dtype=dtype)


def test_single_elements_and_tensors_in_tuples():
    source, target = torch.tensor([2.0, 3.0]), torch.zeros(1)
    copy_one[(1,)]((source, target), 1)
    assert target.item() == 3
    with pytest.raises(interpreter.InterpreterError, match="reads 1 elements outside"):
        copy_one[(1,)]((source, target), 2)


def test_a_view_with_gaps():
    memory = torch.arange(12.0).reshape(3, 4)
    source, target = memory[:2, 1:2], torch.zeros(5)
    copy[(1,)](source, target, 0, 0, 5, 8)  # all between its first and its last element
    assert target.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(interpreter.InterpreterError, match="reads 1 elements outside"):
        copy[(1,)](source, target, 1, 0, 5, 8)


def test_a_descriptor():
    source, target = torch.arange(48.0).reshape(3, 16), torch.zeros(16)
    copy_block[(1,)](TensorDescriptor(source, [3, 16], [16, 1], [1, 16]), target, 2)
    assert target.tolist() == source[2].tolist()
    with pytest.raises(interpreter.InterpreterError, match="reads 16 elements outside"):
        copy_block[(1,)](TensorDescriptor(source, [4, 16], [16, 1], [1, 16]), target, 3)
