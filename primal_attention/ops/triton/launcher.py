"""Launch a Triton function again as it was compiled for the same kinds of arguments.

Triton takes tens of microseconds to find what it has compiled; the kinds of the arguments are
compared sooner. A recorded launch needs not even that: it is prepared, and given addresses.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from primal_attention.ops.replay import Memory, Place, current_recording

_MOST = 4096  # kinds of arguments that are remembered
_THREAD = local()  # in a new one a descriptor cannot be made before something has asked the GPU


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """Description of a tensor by which a GPU loads blocks of it."""

    def __post_init__(self) -> None:
        """Skip Triton's checks, which take four times as long and were made before."""


def ask_the_gpu() -> None:
    """Ask the GPU something, before which this thread can make no descriptors."""
    if not hasattr(_THREAD, "knows_the_gpu"):
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]
        _THREAD.knows_the_gpu = True


class Launcher:
    """Launches a Triton function, ``function[grid](*arguments, **options)``, as once compiled."""

    def __init__(self, function: Any, *, compiles: bool | None = None):
        self.function = function
        # In the interpreter nothing is compiled; on AMD GPUs the sizes of tensors matter too.
        known = isinstance(function, JITFunction) and torch.version.hip is None
        self.compiles = known if compiles is None else compiles
        self.names = tuple(inspect.signature(function.fn).parameters)
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return a call that launches so many programs."""
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


def launched(*any_value: str) -> Callable[[Any], Launcher]:
    """Compile a function with Triton, for any values of some arguments, and launch it again."""
    if not all(isinstance(name, str) for name in any_value):
        raise TypeError("write @launched('N', ...) in the place of @triton.jit")
    return lambda function: Launcher(triton.jit(function, do_not_specialize=any_value))


class Again:
    """A launch by Triton, which looks at tensors."""

    def __init__(self, launch: Callable[..., Any], arguments: Sequence[Any]):
        places = [isinstance(each, (Tensor, TensorDescriptor)) for each in arguments]
        given = [each for each, taken in zip(arguments, places, strict=True) if taken]
        self.launch, self.at = launch, [at for at, taken in enumerate(places) if taken]
        self.template = [
            None if taken else each for each, taken in zip(arguments, places, strict=True)
        ]
        self.tensors: list[Tensor] = [x if isinstance(x, Tensor) else x.base for x in given]
        self.layouts = [  # of a descriptor; None of a tensor
            None if isinstance(x, Tensor) else (x.shape, x.strides, x.block_shape) for x in given
        ]

    def bound(self, places: Sequence[Place]) -> Callable[[Memory], None]:
        """Return a step that launches it again, on the tensors at these places."""
        launch, template = self.launch, self.template
        targets = list(zip(self.at, places, self.layouts, strict=True))

        def run(memory: Memory) -> None:
            arguments = template.copy()
            for number, place, layout in targets:
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
        """Return a step that launches it again, on the tensors at these places."""
        template, grid, launch = self.template, self.grid, self.launch
        run, function = self.compiled.run, self.compiled.function
        metadata, runtime = self.compiled.packed_metadata, knobs.runtime
        pointers, described = [], []
        for number, place, layout in zip(self.at, places, self.layouts, strict=True):
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
    """As much of a tensor as a descriptor needs."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address


def _is_watched(hook: Any) -> bool:
    """Return whether a profiler listens to launches."""
    return bool(getattr(hook, "calls", hook))


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the key of a compiled form: of tensors dtypes and alignment, else all."""
    return [
        (each.dtype, each.data_ptr() % 16 == 0)
        if isinstance(each, Tensor)
        else (each.base.dtype, *each.block_shape)
        if isinstance(each, TensorDescriptor)
        else each
        for each in arguments
    ]
