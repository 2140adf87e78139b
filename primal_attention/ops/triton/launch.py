"""Launch fused ops: sizes and division of the work, tensors they read and write, sums of parts.

*Shares* are for sums in any order: a program takes one share of the tokens of one sequence and
head, or several whole sequences. *Segments* are for walks with a carry: one program walks over the
blocks of one segment; where sequences and heads are programs enough, a sequence is one segment.
What a program sums along the tokens is written apart and added up afterwards, so that the same
inputs give the same bits.

Triton takes tens of microseconds to find what it has compiled: here the kinds of the arguments are
compared, which is sooner. A recorded launch needs not even that: it is prepared, and given
addresses.

Letters: B batch, N tokens, H heads, C columns of a token, R rows, E columns of a matrix.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import local
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from primal_attention.ops.replay import OPEN, Memory, Place

# The dtype of the products.
DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The arithmetic of products of float32 matrices, by the dtype of the tokens behind them. Six
# products of bfloat16 parts hold all digits. TensorFloat-32 has those of float16, more than
# bfloat16, and the range of both: beside tokens of half precision its errors are small.
PRODUCTS = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "bf16x6"}
# The arithmetic of products. Sums along the tokens may leave the range of float16, and gradients
# divided by the number of tokens too; TensorFloat-32 has its digits and a wider range.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}
# How many bfloat16 numbers hold the digits of one, as it comes and after arithmetic; float32 is not
# taken apart.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 0}
PARTS_OF_GRADIENT = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 0}

PROGRAMS = 512  # of segments, at least: about four for each multiprocessor of a large GPU
SHORTEST = 4  # blocks of a segment, so that the first pass does not become most of the work
_FEW_PROGRAMS = 800  # about six for each multiprocessor of a large GPU
_BLOCK = 1 << 7  # more tokens than any block has
_SUMS = 3  # blocks that take as long as to write the sums of a share and to add them up
_MOST = 4096  # kinds of arguments that are remembered
_THREAD = local()  # in a new one a descriptor cannot be made before something has asked the GPU
_ROWS, _COLUMNS = 32, 128  # of a block
_FEW, _NARROW = 512, 16  # as many rows are one block of so many columns, whose sums are the total
_PROGRAMS = 528  # wanted: four for each multiprocessor, so that enough memory is under way
_AT_ONCE = {4: 4, 32: 32, 128: 64}  # parts that a program reads, up to so many of them; else 256
_MANY = 128  # parts
_READ = 512  # entries of a warp at once: a program waits for each of its reads


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """Description of a tensor by which a GPU loads blocks of it."""

    def __post_init__(self) -> None:
        """Skip Triton's checks, which take four times as long and were made before."""


def ask_the_gpu() -> None:
    """Ask the GPU something, before which this thread can make no descriptors."""
    if not hasattr(_THREAD, "knows_the_gpu"):
        torch.cuda.Event().record()
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
        recording = OPEN.recording
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


class Config(NamedTuple):
    """Sizes of a fused op, found by measuring."""

    block: int  # tokens
    num_warps: int
    num_stages: int
    tile: int = 0  # columns of a matrix that one program takes
    programs: int = 264  # shares that are under way at once: two for each multiprocessor
    least: int = 4  # blocks of a share, so that its sums are small beside its tokens

    @property
    def launch(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def warps_of(programs: int) -> int:
    """Choose the warps of a pass over small matrices, through whose code each program runs once."""
    # With few programs the time goes with the length of the code, which is the shorter the less of
    # a matrix a thread has; with many, threads that have more of it do more at once.
    return 8 if programs <= _FEW_PROGRAMS else 4


class Shares(NamedTuple):
    """The division of each sequence, or several whole sequences for each program."""

    programs: int  # all together
    splits: int  # of a sequence
    tokens: int  # of a share, at most
    whole: bool  # whether all of its blocks are
    sequences: int = 1  # of a program, at most


def spread_shares(z: Tensor, config: Config) -> Shares:
    """Divide the sequences z [B, N, H, C] so that a GPU is busy; some shares have a block less."""
    B, N, H, _ = z.shape
    blocks = -(-N // config.block)
    splits = _splits(B * H, blocks, config.programs, config.least)
    tokens = -(-blocks // splits) * config.block
    return Shares(B * H * splits, splits, tokens, N % config.block == 0)


def shares_of(z: Tensor, config: Config) -> Shares:
    """Divide like `spread_shares`, into equal shares except possibly the last of a sequence."""
    (B, N, H, _), spread = z.shape, spread_shares(z, config)
    splits = -(-N // spread.tokens)
    return spread._replace(programs=B * H * splits, splits=splits)


def in_runs(z: Tensor, shares: Shares, config: Config) -> Shares:
    """Give a program several whole sequences z, so that fewer sums over all are written."""
    if shares.splits > 1:
        return shares
    B, _, H, _ = z.shape
    sequences = _sequences(B, H, shares.tokens // config.block, config.programs)
    return shares._replace(programs=-(-B // sequences) * H, sequences=sequences)


@cache
def _splits(sequences: int, blocks: int, programs: int, least: int) -> int:
    """Choose how many shares of a sequence take the least time; sums cost some blocks each."""
    return min(
        range(1, max(1, blocks // least) + 1),
        key=lambda splits: -(-sequences * splits // programs) * (blocks / splits + _SUMS),
    )


@cache
def _sequences(B: int, H: int, blocks: int, programs: int) -> int:
    """Choose how many whole sequences of a program take the least time, with all at once."""
    return min(
        range(1, -(-B // max(1, programs // H)) + 1),
        key=lambda each: -(-(-(-B // each) * H) // programs) * (each * blocks + _SUMS),
    )


class Segments(NamedTuple):
    """The division of each sequence."""

    tokens: int  # of a segment
    number: int  # of segments

    def whole(self, N: int, block: int) -> bool:
        """Return whether such blocks divide N and the segments, made perhaps of other blocks."""
        return N % block == 0 and self.tokens % block == 0


def divide(z: Tensor, block: int, programs: int | None = None) -> Segments:
    """Divide the sequences z [B, N, H, C] into segments that make enough programs."""
    B, N, H, _ = z.shape
    blocks = -(-N // block)
    wanted = min(-(-(programs or PROGRAMS) // (B * H)), -(-blocks // SHORTEST))
    length = -(-blocks // wanted)
    return Segments(length * block, -(-blocks // length))


def padded(width: int) -> int:
    """Return the width of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (int(width) - 1).bit_length())


@contextmanager
def writable(tensor: Tensor | None) -> Iterator[Tensor | None]:
    """Yield the tensor, or one with adjacent columns that is copied into it on leaving."""
    if tensor is None or _adjacent(tensor):
        yield tensor
        return
    rows = tensor.new_empty(tensor.shape)
    yield rows
    tensor.copy_(rows)


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor [B, N, H, C], copied where its columns are not adjacent."""
    return tensor if _adjacent(tensor) else tensor.contiguous()


def _adjacent(tensor: Tensor) -> bool:
    """Return whether columns are adjacent, and rows so near that a block has short offsets."""
    near = tensor.stride(1) * _BLOCK < 1 << 31
    return near and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied where its last axis has gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mask_bytes(token_mask: Tensor | None) -> Tensor | None:
    """Return the mask as contiguous numbers."""
    return None if token_mask is None else token_mask.contiguous().view(torch.uint8)


def float32(like: Tensor, *shape: int) -> Tensor:
    """Allocate a float32 tensor on the same device."""
    return like.new_empty(shape, dtype=torch.float32)


def empty_rows(tensor: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the same shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return small tensors as the fused ops read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def described(z: Tensor, block: int) -> Tensor | Descriptor:
    """Describe blocks of one head's tokens of z [B, N, H, C] where possible, else return z.

    Described blocks are loaded without addresses in registers, but whole: all tokens must be real.
    The descriptor is of [B, N, H C], so that the heads of a token must lie beside each other.
    """
    B, N, H, C = z.shape
    of_batch, of_tokens, of_heads, _ = z.stride()
    columns = (H - 1) * of_heads + C
    aligned = (z.data_ptr() | (of_batch | of_tokens | of_heads) * z.element_size()) % 16 == 0
    if not aligned or columns > of_tokens or not loads_blocks(z.device):
        return z
    if z.is_cuda:
        ask_the_gpu()
    return Descriptor(z, [B, N, columns], [of_batch, of_tokens, 1], [1, block, C])


@cache
def loads_blocks(device: torch.device) -> bool:
    """Return whether this device, the current one, has descriptors: Hopper GPUs and later."""
    if knobs.runtime.interpret:
        return True
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


constant = cache(tl.constexpr)  # one object for each number, which is soon found to be the same


def strides(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return strides of a tensor [B, N, H, C] that may be missing."""
    if tensor is None:
        return 0, 0, 0
    of_batch, of_tokens, of_heads, _ = tensor.stride()
    # That of the tokens is compiled for, since it does not change with their number: the rows of a
    # block are then known distances apart, and a thread keeps one address for all of its own.
    return of_batch, constant(of_tokens), of_heads


def matrix_strides(matrix: Tensor | None) -> tuple[int, ...]:
    """Return strides of counts [B, N] or an output map [S, C] that may be missing."""
    return (0, 0) if matrix is None else matrix.stride()


def batch_stride(matrix: Tensor | None) -> int:
    """Return the stride of the sequences of contiguous matrices [B, H, R, C]; 0 for [H, R, C]."""
    return matrix.stride(0) if matrix is not None and matrix.ndim == 4 else 0


@launched("R", "share")
def row_sum_blocks(
    rows, parts, stride, R, E, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum some columns over a share of the rows."""
    program = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = program * share
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + share, R), ROWS):
        r = start + tl.arange(0, ROWS)
        exists = (r < R)[:, None] & (c < E)[None, :]
        sums += tl.load(rows + r[:, None] * stride + c[None, :], mask=exists, other=0.0).to(
            tl.float32
        )
    tl.store(parts + program * E + c, tl.sum(sums, 0).to(parts.dtype.element_ty), mask=c < E)


@launched("number_0", "number_1", "number_2", "number_3")
def add_up_blocks(
    parts_0, total_0, parts_1, total_1, parts_2, total_2, parts_3, total_3,
    number_0, number_1, number_2, number_3, layout_0, layout_1, layout_2, layout_3,
    READ: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add up a block of one of the totals; it may be launched early, and waits for its parts."""
    if OVERLAPS:
        gdc_wait()
    pair = tl.program_id(1)
    if pair == 0:
        _add_up(parts_0, total_0, number_0, layout_0, READ)
    elif pair == 1:
        _add_up(parts_1, total_1, number_1, layout_1, READ)
    elif pair == 2:
        _add_up(parts_2, total_2, number_2, layout_2, READ)
    else:
        _add_up(parts_3, total_3, number_3, layout_3, READ)


@triton.jit
def _add_up(parts, total, number, layout, READ: tl.constexpr):
    """Add up one group of entries; the layout is a `Layout`."""
    if parts is not None:
        _, size, groups, of_group, of_part, columns, of_row, of_column = layout
        AT_ONCE: tl.constexpr = layout[0]
        BLOCK: tl.constexpr = READ // AT_ONCE
        group = tl.program_id(2).to(tl.int64)
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = (place < size) & (group < groups)
        parts, total = parts + group * of_group, total + group * size
        sums = tl.zeros([AT_ONCE, BLOCK], tl.float32)
        for start in range(0, number, AT_ONCE):
            part = start + tl.arange(0, AT_ONCE)
            exists = (part < number)[:, None] & inside[None, :]
            places = parts + part.to(tl.int64)[:, None] * of_part + place[None, :]
            sums += tl.load(places, mask=exists, other=0.0)
        places = total + place // columns * of_row + place % columns * of_column
        tl.store(places, tl.sum(sums, 0).to(total.dtype.element_ty), mask=inside)


def column_sum(rows: Tensor) -> Tensor:
    """Sum the rows of a matrix [R, E] in float32; the result has its dtype."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    R, E = rows.shape
    total = rows.new_empty(E)
    if R <= _FEW:
        _sum_blocks(rows, total, R, padded(R), _NARROW)
        return total
    share = -(-R // max(1, _PROGRAMS // -(-E // _COLUMNS)) // _ROWS) * _ROWS
    parts = rows.new_empty((-(-R // share), E), dtype=torch.float32)
    _sum_blocks(rows, parts, share, _ROWS, _COLUMNS)
    add_up((parts, total))
    return total


def _sum_blocks(rows: Tensor, sums: Tensor, share: int, height: int, width: int) -> None:
    """Sum over each share of the rows."""
    R, E = rows.shape
    row_sum_blocks[(-(-R // share), -(-E // width))](
        rows, sums, rows.stride(0), R, E, share, height, width, num_warps=8
    )


class Layout(NamedTuple):
    """Places of the parts of a sum, and of its total."""

    at_once: Any  # parts that a program reads
    size: int  # entries of a group
    groups: int  # of entries that lie together in a part
    of_group: int  # strides of the parts
    of_part: int
    columns: int  # of the total
    of_row: int  # strides of the total
    of_column: int


_MISSING = Layout(0, 0, 0, 0, 0, 1, 0, 0)


@contextmanager
def summed(z: Tensor, shares: Shares, *totals: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Allocate the sums of the programs over z [B, N, H, C]; add them up on leaving.

    A total is [B, H, R, C]; [H, R, C], over the sequences too; or [C], over the heads too.
    """
    contiguous = [
        total if total is None or total.is_contiguous() else empty_rows(total) for total in totals
    ]
    parts = [_parts(total, z, shares) for total in contiguous]
    pairs = list(zip(parts, contiguous, strict=True))
    yield [total if part is None else part for part, total in pairs]
    add_up(*pairs)
    for total, written in zip(totals, contiguous, strict=True):
        if total is not None and written is not None and written is not total:
            total.copy_(written)


def _parts(total: Tensor | None, z: Tensor, shares: Shares) -> Tensor | None:
    """Allocate the parts, [number, ...]; None where the total is the only one."""
    if total is None:
        return None
    B, _, H, _ = z.shape
    number = {4: shares.splits, 3: shares.programs // H, 1: shares.programs}[total.ndim]
    if number == 1:
        return None
    if total.ndim == 4:  # the parts of a sequence are neighbours
        shape = (B, number, *total.shape[1:])
        return total.new_empty(shape, dtype=torch.float32).transpose(0, 1)
    return total.new_empty((number, *total.shape), dtype=torch.float32)


def add_up(*sums: tuple[Tensor | None, Tensor | None]) -> None:
    """Add up to four totals, each from its parts, [number, ...]; None for what is not wanted.

    A total is contiguous or a matrix [R, C]. Parts are contiguous, but for their first two axes.
    """
    wanted = [(parts, total) for parts, total in sums if parts is not None and total is not None]
    if not wanted:
        return
    missing = 4 - len(wanted)
    numbers = [len(parts) for parts, _ in wanted] + [0] * missing
    # Many parts make few programs, which are to read the more at once.
    warps = 16 if max(numbers) > _MANY else 4
    layouts = [_layout(*pair) for pair in wanted]
    blocks = max(-(-each.size * each.at_once.value // (_READ * warps)) for each in layouts)
    groups = max(each.groups for each in layouts)
    tensors = [tensor for pair in wanted for tensor in pair]
    overlaps = _overlaps(tensors[0].device)
    add_up_blocks[(blocks, len(wanted), groups)](
        *tensors, *[None] * (2 * missing), *numbers, *map(tuple, layouts + [_MISSING] * missing),
        _READ * warps, overlaps, num_warps=warps, **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip


@cache
def _overlaps(device: torch.device) -> bool:
    """Return whether a launch may begin before the one ahead of it is over."""
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)


def _layout(parts: Tensor, total: Tensor) -> Layout:
    number = len(parts)
    at_once = constant(next((some for most, some in _AT_ONCE.items() if number <= most), 256))
    if not parts.is_contiguous():
        groups, strides = len(total), parts.stride()
        return Layout(at_once, total[0].numel(), groups, strides[1], strides[0], 1, 1, 0)
    size = total.numel()
    if total.is_contiguous():
        return Layout(at_once, size, 1, 0, size, 1, 1, 0)
    return Layout(at_once, size, 1, 0, size, total.shape[1], *total.stride())
