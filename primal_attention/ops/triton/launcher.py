"""Launch a Triton function again as it was compiled for the same kinds of arguments.

Triton looks at each argument of each launch to find what it has compiled for its kind: tens of
microseconds, as long as many a fused op runs. The arguments of a training step are of the same
kinds as those of the step before, which is seen much sooner. A launch that is recorded needs not
even that: it is prepared, and given addresses.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from primal_attention.ops.replay import Memory, Place, current_recording

_MOST = 4096  # kinds of arguments that are remembered
_THREAD = local()  # in a new one a descriptor cannot be made before something has asked the GPU


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """What a GPU is told of a tensor to load blocks of it by itself.

    Triton would check it for as long as it takes to make four of them; its maker has.
    """

    def __post_init__(self) -> None:
        pass


def ask_the_gpu() -> None:
    """Let this thread know its GPU, without which it can make no descriptors."""
    if not hasattr(_THREAD, "knows_the_gpu"):
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]
        _THREAD.knows_the_gpu = True


class Launcher:
    """A Triton function, and what has been compiled of it.

    It is launched from Python, as ``function[grid](*arguments, **options)``. In Triton's
    interpreter nothing is compiled; on AMD GPUs the sizes of tensors matter too.
    """

    def __init__(self, function: Any, *, compiles: bool | None = None):
        self.function = function
        known = isinstance(function, JITFunction) and torch.version.hip is None
        self.compiles = known if compiles is None else compiles
        self.names = tuple(inspect.signature(function.fn).parameters)
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What launches so many programs."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        recording = current_recording()
        if not self.compiles:
            launch = partial(self.function[grid], **options)
            launch(*arguments)
            if recording is not None:
                recording.launch(Again(launch, arguments))
            return
        key = driver.active.get_current_device(), *_kinds(arguments), *options.items()
        compiled, (x, y, z) = self.compiled.get(key), (*grid, 1, 1)[:3]
        named = [options[name] for name in self.names[len(arguments) :]]
        if compiled is not None:
            compiled[x, y, z](*arguments, *named)
        else:
            if len(self.compiled) == _MOST:
                self.compiled.clear()
            compiled = self.compiled[key] = self.function[grid](*arguments, **options)
        if recording is not None:
            recording.launch(Prepared(compiled, (x, y, z), (*arguments, *named)))


launched = Launcher


class Again:
    """A launch by Triton, which looks at tensors."""

    def __init__(self, launch: Callable[..., Any], arguments: Sequence[Any]):
        self.launch, self.arguments = launch, arguments
        self.tensors = [_tensor_of(each) for each in arguments if _is_place(each)]

    def bound(self, places: Sequence[Place]) -> Callable[[Memory], None]:
        """What launches it again, on the tensors at these places."""
        launch, template = self.launch, list(self.arguments)
        at = [number for number, each in enumerate(template) if _is_place(each)]
        layouts = [_layout(template[number]) for number in at]
        for number in at:
            template[number] = None

        def run(memory: Memory) -> None:
            arguments = template.copy()
            for number, place, layout in zip(at, places, layouts, strict=True):
                tensor = place.tensor(memory)
                arguments[number] = tensor if layout is None else Descriptor(tensor, *layout)
            launch(*arguments)

        return run


class Prepared(Again):
    """A launch of what is compiled, which takes addresses."""

    def __init__(self, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]):
        super().__init__(compiled[grid], arguments)
        self.compiled, self.grid = compiled, grid

    def bound(self, places: Sequence[Place]) -> Callable[[Memory], None]:
        """What launches it again, on the tensors at these places."""
        template, grid, launch = list(self.arguments), self.grid, self.launch
        run, function = self.compiled.run, self.compiled.function
        metadata, runtime = self.compiled.packed_metadata, knobs.runtime
        at = [number for number, each in enumerate(template) if _is_place(each)]
        layouts = [_layout(template[number]) for number in at]
        pointers, described = [], []
        for number, place, layout in zip(at, places, layouts, strict=True):
            template[number] = None
            if layout is None:
                pointers.append((number, place.buffer, place.offset))
            else:
                described.append((number, place.buffer, place.offset, layout))

        def again(memory: Memory) -> None:
            arguments, addresses = template.copy(), memory.addresses
            for number, buffer, offset in pointers:
                arguments[number] = addresses[buffer] + offset
            if described:
                ask_the_gpu()
                for number, buffer, offset, layout in described:
                    base = _Address(addresses[buffer] + offset)
                    arguments[number] = Descriptor(base, *layout)
            if _is_watched(runtime.launch_enter_hook) or _is_watched(runtime.launch_exit_hook):
                launch(*arguments)
            else:
                run(*grid, memory.stream, function, metadata, None, None, None, *arguments)

        return again


class _Address:
    """What a descriptor needs of a tensor."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.address


def _is_watched(hook: Any) -> bool:
    """Whether somebody wants to be told of launches."""
    return bool(getattr(hook, "calls", hook))


def _is_place(argument: Any) -> bool:
    return isinstance(argument, (Tensor, TensorDescriptor))


def _tensor_of(argument: Any) -> Tensor:
    tensor: Tensor = argument if isinstance(argument, Tensor) else argument.base
    return tensor


def _layout(argument: Any) -> tuple[Any, ...] | None:
    """How a descriptor reads its tensor; None of a tensor."""
    if isinstance(argument, Tensor):
        return None
    return argument.shape, argument.strides, argument.block_shape


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What decides for which compiled form they are: of tensors dtypes and alignment, else all."""
    return [
        (each.dtype, each.data_ptr() % 16 == 0)
        if isinstance(each, Tensor)
        else (each.base.dtype, *each.block_shape)
        if isinstance(each, TensorDescriptor)
        else each
        for each in arguments
    ]
