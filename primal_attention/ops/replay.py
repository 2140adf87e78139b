"""Record what a pass of a fused op does, and repeat it for other tensors of the same layout.

Working out what to allocate and launch takes Python longer than a small pass takes a GPU, so it is
done once a layout: a *recording* notes each operation of PyTorch and each launch, with its tensors
as places in numbered buffers. A *plan* repeats them for other buffers. A pass must not depend on
the values of its tensors, nor write to others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

_MOST = 2048  # layouts that are remembered of one pass
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Launch(Protocol):
    """Launch that can be repeated with other tensors."""

    tensors: list[Tensor]  # those that it was recorded with

    def bound(self, places: Sequence[Place]) -> Callable[[Memory], None]:
        """Return a step that launches it again, on the tensors at these places."""


class Place(NamedTuple):
    """Place of a tensor in a buffer."""

    buffer: int
    offset: int  # in bytes, from the first element of the buffer
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool  # whether it is the buffer as it was made

    def tensor(self, memory: Memory) -> Tensor:
        """Return the tensor."""
        buffer = memory.buffers[self.buffer]
        assert buffer is not None
        if self.whole:
            return buffer
        if buffer.dtype != self.dtype:
            buffer = buffer.view(self.dtype)
        offset = buffer.storage_offset() + self.offset // self.dtype.itemsize
        return buffer.as_strided(self.shape, self.stride, offset)


class Memory:
    """The buffers of one call."""

    __slots__ = ("addresses", "buffers", "stream")

    def __init__(self, tensors: Sequence[Tensor], number: int):
        missing = number - len(tensors)
        self.buffers: list[Tensor | None] = [*tensors, *[None] * missing]
        self.addresses = [*map(Tensor.data_ptr, tensors), *[0] * missing]
        first = tensors[0]
        self.stream = torch._C._cuda_getCurrentRawStream(first.get_device()) if first.is_cuda else 0

    def add(self, number: int, tensor: Tensor) -> None:
        """Put a new buffer in its place."""
        self.buffers[number] = tensor
        self.addresses[number] = tensor.data_ptr()


Step = Callable[[Memory], None]


class PassPlan:
    """Steps of a pass, for any tensors of the layout that it was recorded with."""

    def __init__(self, recording: Recording, results: Any):
        self._names = tuple(results) if isinstance(results, dict) else None
        leaves = results.values() if isinstance(results, dict) else results
        self._results = [None if x is None else recording.place(x) for x in leaves]
        self._number = recording.number
        kept = {x.buffer for x in self._results if x is not None}
        last = {buffer: at for at, (_, used) in enumerate(recording.steps) for buffer in used}
        self._steps: list[tuple[Step, tuple[int, ...]]] = []
        for at, (step, used) in enumerate(recording.steps):
            spent = {each for each in used if last[each] == at} - kept
            self._steps.append((step, tuple(spent - set(range(recording.num_inputs)))))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Compute the results of the pass, a list or by name; free buffers after their last use."""
        memory = Memory(tensors, self._number)
        buffers = memory.buffers
        for step, spent in self._steps:
            step(memory)
            for each in spent:
                buffers[each] = None
        found = [None if x is None else x.tensor(memory) for x in self._results]
        return found if self._names is None else dict(zip(self._names, found, strict=True))


class Plans:
    """Plans of one pass by layout, recorded when a layout is seen for the second time."""

    def __init__(self, run: Callable[..., Any]):
        self._run = run
        self._plans: dict[Any, PassPlan | None] = {}

    def __call__(self, given: Sequence[Any], *options: Any) -> Any:
        """Run the pass on tensors, None and numbers, and on options that are no tensors."""
        tensors = [each for each in given if isinstance(each, Tensor)]
        layouts = (
            (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x
            for x in given
        )
        key = *options, *layouts, tensors[0].get_device()
        plan = self._plans.get(key)
        if plan is not None:
            return plan(tensors)
        if key not in self._plans:
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[key] = None
            return self._run(given, *options)
        with Recording(tensors) as recording:
            aliases = iter(recording.inputs)
            own = [next(aliases) if isinstance(x, Tensor) else x for x in given]
            results = self._run(own, *options)
            self._plans[key] = PassPlan(recording, results)
        return results


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations on tensors, and on what was computed from them."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        # Each is a tensor of its own here, also where a caller gives one twice.
        self.inputs = [torch.ops.aten.alias(each) for each in tensors]
        self.num_inputs = self.number = len(tensors)
        self.steps: list[tuple[Step, set[int]]] = []
        self._places: dict[int, Place] = {}
        self._alive: list[Any] = []  # so that no two tensors have the same number
        for number, tensor in enumerate(self.inputs):
            self._note(tensor, number)

    def __enter__(self) -> Recording:
        OPEN.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: object) -> None:
        OPEN.recording = None
        super().__exit__(*problem)  # type: ignore[no-untyped-call]

    def place(self, tensor: Tensor) -> Place:
        """Return the place of a tensor of this recording."""
        return self._places[id(tensor)]

    def launch(self, launch: Launch) -> None:
        """Note a launch."""
        places = [self.place(each) for each in launch.tensors]
        self.steps.append((launch.bound(places), {each.buffer for each in places}))

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        self._alive.append((leaves, results))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        made = self._made(tree_flatten(results)[0], tensors)
        if not made and not function._schema.is_mutable:
            return results  # a view
        if function._schema.name.removeprefix("aten::") in _ALLOCATIONS:
            [(number, tensor)] = made
            self.steps.append((_allocation(number, tensor), {number}))
            return results
        numbers = [number for number, _ in made]
        used = {self.place(each).buffer for each in tensors} | set(numbers)
        operands = tree_map_only(Tensor, self.place, tuple(args))
        self.steps.append((_call(function, operands, kwargs, numbers), used))
        return results

    def _made(self, results: Sequence[Any], given: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return new buffers among the results; note others as views of what was given."""
        made = []
        for result in results:
            if not isinstance(result, Tensor) or id(result) in self._places:
                continue
            memory = result.untyped_storage()._cdata
            base = next((x for x in given if x.untyped_storage()._cdata == memory), None)
            if base is None:
                made.append((self.number, result))
                self._note(result, self.number)
                self.number += 1
            else:
                near = self.place(base)
                offset = near.offset + result.data_ptr() - base.data_ptr()
                same = near.whole and result.dtype == base.dtype and result.shape == base.shape
                whole = same and not offset and result.stride() == base.stride()
                self._note(result, near.buffer, offset, whole=whole)
        return made

    def _note(self, tensor: Tensor, buffer: int, offset: int = 0, *, whole: bool = True) -> None:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        self._places[id(tensor)] = Place(buffer, offset, tensor.dtype, shape, stride, whole)
        self._alive.append(tensor)


class _Open(threading.local):
    recording: Recording | None = None  # the one that is open in this thread


OPEN = _Open()


def _allocation(number: int, tensor: Tensor) -> Step:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    dtype, device = tensor.dtype, tensor.device
    empty = torch.empty_strided

    def allocate(memory: Memory) -> None:
        memory.add(number, empty(shape, stride, dtype=dtype, device=device))

    return allocate


def _call(function: Any, operands: Sequence[Any], options: Any, numbers: list[int]) -> Step:
    """Repeat an operation on places, or lists of them; its results are buffers of these numbers."""
    template = list(operands)
    places = [(at, each) for at, each in enumerate(template) if type(each) is Place]
    lists = [(at, each) for at, each in enumerate(template) if type(each) is list]

    def call(memory: Memory) -> None:
        arguments = template.copy()
        for at, place in places:
            arguments[at] = place.tensor(memory)
        for at, each in lists:
            arguments[at] = [x.tensor(memory) if type(x) is Place else x for x in each]
        results = function(*arguments, **options)
        if numbers:
            new = (results,) if isinstance(results, Tensor) else results
            for number, tensor in zip(numbers, new, strict=True):
                memory.add(number, tensor)

    return call
