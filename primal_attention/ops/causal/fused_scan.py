"""The scan of one or two sides as fused passes, with or without a learned time.

Three steps. Programs walk over segments of a sequence and leave, before each block of tokens, the
sum over the earlier blocks of the segment. These sums are joined over the segments. Then every
block is computed by itself: its dense kernel matrix, and the sums before it (and behind it, where
later tokens are read). README.md derives the gradients and counts the traffic.

With two sides, queries store u and read the v that keys have stored, and the other way round. With
one side, queries read and keys store. A gradient goes the other way: queries then store the
gradients of what they have read, and keys read them.

Letters: B batch, N tokens, H heads, P features, V values, n tokens of a block.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.causal.eager import ScanInputs, scan_eager
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import PRECISION, float32, launched, padded

# Tokens of a block, by the padded number of entries of a sum, at most, and the arithmetic of
# products. Both passes have the same blocks: the backward pass reads the sums of the forward pass.
BLOCKS = {
    (64 * 64, "bf16"): 64,
    (64 * 128, "bf16"): 64,
    (128 * 128, "bf16"): 32,
    (64 * 64, "tf32"): 32,
    (128 * 128, "tf32"): 16,
    (64 * 64, "ieee"): 16,
}
# No product is one of a whole warp group, whose operands the assembler of Triton 3.6 can look for
# at a wrong address: those have at least 64 rows and four warps.
_ROWS = 32  # tokens of a block that one program computes, at most
_WARPS = 2  # of a walk, whose products have as many rows as there are features
_TILE = 64 * 32  # entries of a sum that a walk carries, at most
WIDEST = 256
_ENTRIES = 256  # of a sum, that a program joins over the segments


# The sums before each block, or behind it: over the blocks of its segment, [B, blocks, H, sides, P,
# V], over the other segments, [B, segments, H, sides, P, V], and the time between the block and the
# end of its segment where the walk began, [B, blocks, H].
_SUMS = "states", "starts", "elapsed"
KEPT = tuple(f"{direction}_{name}" for direction in ("past", "later") for name in _SUMS)
Sums = Sequence[Tensor | None]
NO_SUMS: Sums = (None, None, None)


class ScanOp(FusedOp):
    """Scan of sums: each token reads the sums over the tokens up to it, or over all."""

    name = "scan"
    inputs = ScanInputs
    differentiable = ("z", "values", "state", "steps")
    outputs = ("out", "after", *KEPT)
    num_outputs = first_kept = 2

    def supports(self, given: ScanInputs) -> bool:
        """Return whether the passes are made for these dtypes, sizes and maps."""
        z, values, maps = given.z, given.values, {given.map_q, given.map_k}
        if not {z.dtype, values.dtype} <= set(PRECISION) or not tt.has_maps(*maps - {"unit_elu"}):
            return False
        P, V = padded(z.shape[-1]), padded(values.shape[-1])
        largest = max(key[0] for key in BLOCKS if key[1] == PRECISION[z.dtype])
        return max(P, V) <= WIDEST and largest >= P * V

    def empty(self, given: ScanInputs) -> Sequence[Tensor]:
        """Allocate the reads of the tokens, the sums after the last one, and sums of the blocks."""
        (_, B, N, H, P), (sides, V) = given.z.shape, given.values.shape[2::2]
        out, after = float32(given.z, B, N, H, sides, V), float32(given.z, B, H, sides, P, V)
        past = _Call(given).new_sums()
        later = [torch.empty_like(x) if given.future else x.new_empty(0) for x in past]
        return [out, after, *past, *later]

    def forward(self, given: ScanInputs, *, keep: bool) -> Sequence[Tensor]:
        """Return the reads of the tokens, the sums after the last one, and sums of the blocks."""
        return scan_forward(given)

    def backward(self, given: ScanInputs, call: Backward) -> dict[str, Tensor]:
        """Return the gradients of the tokens, their values, the state and the steps."""
        sums = [each if each.numel() else None for each in call.kept]
        return scan_backward(given, sums, *call.grads)

    def eager(self, given: ScanInputs) -> Sequence[Tensor]:
        """Return the outputs and the sums, in plain PyTorch."""
        return scan_eager(given)


class _Rows(NamedTuple):
    """Tokens of one or two sides as the device code reads them."""

    tensor: Tensor  # [sides, B, N, H, C]
    strides: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Rows":
        tensor = launch.contiguous_rows(tensor)
        of_side, of_batch, of_tokens, of_heads, _ = tensor.stride()
        return cls(tensor, (of_side, of_batch, launch.constant(of_tokens), of_heads))


class _Call:
    """Sizes, rows and compile-time constants of all launches of a call."""

    def __init__(self, given: ScanInputs):
        self.given, self.timed = given, given.steps is not None
        _, self.B, self.N, self.H, self.P = given.z.shape
        self.sides, self.V = given.values.shape[2], given.values.shape[-1]
        precision = PRECISION[given.z.dtype]
        entries = padded(self.P) * padded(self.V)
        block = BLOCKS[min(x for x in BLOCKS if x[1] == precision and x[0] >= entries)]
        self.segments = launch.divide(given.z[0], block)
        self.blocks, self.parts = -(-self.N // block), -(-block // _ROWS)
        self.num_warps = 4 if entries <= 64 * 64 else 8
        self.kept = torch.bfloat16 if given.z.dtype == torch.bfloat16 else torch.float32
        self.layout = self.N, self.H, self.segments.number, self.segments.tokens
        self.compiled: dict[str, Any] = {
            "P": self.P,
            "V": self.V,
            "WIDTH_P": padded(self.P),
            "WIDTH_V": padded(self.V),
            "BLOCK": block,
            "PRECISION": precision,
            "SIDES": self.sides,
            "MAP_Q": given.map_q,
            "MAP_K": given.map_k,
        }

    @cached_property
    def z(self) -> _Rows:
        """Queries and keys."""
        return _Rows.of(self.given.z)

    @cached_property
    def values(self) -> _Rows:
        """Values to store."""
        return _Rows.of(self.given.values.movedim(2, 0))

    @cached_property
    def steps(self) -> Tensor | None:
        """The steps of time in float32, contiguous."""
        steps = self.given.steps
        return None if steps is None else steps.float().contiguous()

    @cached_property
    def mask(self) -> Tensor | None:
        """The real tokens as numbers."""
        return launch.mask_bytes(self.given.token_mask)

    def launch_blocks(self, function: Any, kinds: int, *arguments: Any, **options: Any) -> None:
        """Launch programs of so many kinds for the tokens of each block."""
        rows = self.compiled["BLOCK"] // self.parts
        function[(self.B * self.blocks * self.H * kinds * self.parts,)](
            *arguments,
            *self.layout,
            ROWS=rows,
            **options,
            **self.compiled,
            num_warps=self.num_warps,
        )

    def new_sums(self) -> list[Tensor]:
        """Allocate the sums of one direction; no times where none passes."""
        z, shape = self.given.z, (self.H, self.sides, self.P, self.V)
        elapsed = (self.B, self.blocks, self.H) if self.timed else (0,)
        return [
            z.new_empty((self.B, self.blocks, *shape), dtype=self.kept),
            float32(z, self.B, self.segments.number, *shape),
            float32(z, *elapsed),
        ]

    def sums(
        self, rows: _Rows, start: Tensor | None, *, storing: int, backward: bool
    ) -> tuple[Sums, Tensor]:
        """Sums before each block, backward behind it, and those over all tokens.

        The first rows are stored by the features of the side ``storing``.
        """
        states, starts, elapsed = self.new_sums()
        ends, after = torch.empty_like(starts), float32(starts, self.B, *starts.shape[2:])
        passed = float32(starts, *starts.shape[:3])
        timed, grid = self.timed, self.B * self.segments.number * self.H
        tile = min(padded(self.V), max(16, _TILE // padded(self.P)))
        segment_states[(grid * self.sides * -(-self.V // tile),)](
            self.z.tensor, rows.tensor, self.steps, self.mask, states, ends,
            elapsed if timed else None, passed if timed else None,
            self.z.strides, rows.strides, *self.layout,
            STORING=storing, BACKWARD=backward, **{**self.compiled, "WIDTH_V": tile},
            num_warps=_WARPS,
        )  # fmt: skip
        size = self.P * self.V
        join_segments[(self.B * self.H, -(-size // _ENTRIES), self.sides)](
            ends, passed if timed else None, None if start is None else start.contiguous(), starts,
            after, self.H, self.segments.number, size,
            SIDES=self.sides, BACKWARD=backward, WIDTH=_ENTRIES,
        )  # fmt: skip
        return (states, starts, elapsed if timed else None), after


def scan_forward(given: ScanInputs) -> list[Tensor]:
    """Return what each token reads, the sums after the last one, and the sums of the blocks."""
    call = _Call(given)
    storing = 2 - call.sides
    past, after = call.sums(call.values, given.state, storing=storing, backward=False)
    later = NO_SUMS
    if given.future:
        later, _ = call.sums(call.values, None, storing=storing, backward=True)
    out = float32(given.z, call.B, call.N, call.H, call.sides, call.V)
    target = _Rows.of(out.permute(3, 0, 1, 2, 4))
    call.launch_blocks(
        read_blocks, 1,
        call.z.tensor, call.values.tensor, call.steps, call.mask, *past, *later, target.tensor,
        call.z.strides, call.values.strides, target.strides,
    )  # fmt: skip
    kept = [out.new_empty(0) if each is None else each for each in (*past, *later)]
    return [out, after, *kept]


def scan_backward(
    given: ScanInputs, sums: Sums, d_out: Tensor | None, d_after: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradients of the tokens, their values, the state and the steps."""
    call = _Call(given)
    if d_out is None:
        d_out = given.z.new_zeros((call.B, call.N, call.H, call.sides, call.V))
    rows = _Rows.of(d_out.permute(3, 0, 1, 2, 4))
    later, d_state = call.sums(rows, d_after, storing=0, backward=True)
    past = NO_SUMS
    if given.future:
        past, _ = call.sums(rows, None, storing=0, backward=False)
    dz = given.z.new_empty(given.z.shape)
    d_values = given.values.new_empty(given.values.shape)
    of_z, of_values = _Rows.of(dz), _Rows.of(d_values.movedim(2, 0))
    ends = crossing = d_steps = None
    if call.timed:
        ends = float32(dz, call.B, call.N, call.H, 2, 2)
        crossing = float32(dz, call.B, call.blocks, call.H, call.sides)
        d_steps = float32(dz, call.B, call.N, call.H)
    call.launch_blocks(
        gradient_blocks, 3,
        call.z.tensor, call.values.tensor, rows.tensor, call.steps, call.mask,
        *sums, *past, *later, of_z.tensor, of_values.tensor, ends, crossing,
        call.z.strides, call.values.strides, rows.strides, of_z.strides, of_values.strides,
    )  # fmt: skip
    found = {"z": dz, "values": d_values, "state": d_state}
    if given.steps is not None and d_steps is not None:
        step_gradients[(call.B * call.blocks * call.H,)](
            call.steps, call.mask, ends, crossing, d_steps, call.N, call.H,
            SIDES=call.sides, BLOCK=call.compiled["BLOCK"],
        )  # fmt: skip
        found["steps"] = d_steps.to(given.steps.dtype)
    return found


@triton.jit
def _side_of(rows, side, b, h, first):
    """Pointer to the first token of a segment or block of a tensor [sides, B, N, H, C].

    And how far the next token is.
    """
    tensor, strides = rows
    place = b * strides[1] + h * strides[3] + side * strides[0]
    return tensor + place + first.to(tl.int64) * strides[2], strides[2]


@triton.jit
def _clock(steps, b, h, N, H, start, real, BLOCK: tl.constexpr):
    """Time up to each token since the block before, [n], and that of the block; 0 without steps."""
    passed = tl.zeros([BLOCK], tl.float32)
    if steps is not None:
        n = start + tl.arange(0, BLOCK)
        passed += tl.load(steps + (b * N + n) * H + h, mask=real, other=0.0)
    return tl.cumsum(passed, 0), tl.sum(passed, 0)


@triton.jit
def _since(time):
    """The share that is left of what came before a block, at each of its tokens."""
    return tl.exp(-time)


@triton.jit
def _until(time, total):
    """The share that is left of each token at the end of its block."""
    return tl.exp(tl.minimum(time - total, 0.0))


@launched()
def segment_states(
    z, values, steps, mask, states, ends, elapsed, passed, z_strides, value_strides,
    N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, STORING: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Sum a segment up to each of its blocks, and over all.

    A program has some columns of one side; neighbours read the same tokens.
    """
    tiles: tl.constexpr = (V + WIDTH_V - 1) // WIDTH_V
    program, column = tl.program_id(0) // tiles // SIDES, tl.program_id(0) % tiles * WIDTH_V
    side, z, values = tl.program_id(0) // tiles % SIDES, (z, z_strides), (values, value_strides)
    if side == 0:
        _walk_segment(
            program, column, z, values, steps, mask, states, ends, elapsed, passed, STORING, 0,
            N, H, number, tokens, P, V, WIDTH_P, WIDTH_V, BLOCK, PRECISION, SIDES,
            MAP_K if STORING else MAP_Q, BACKWARD,
        )  # fmt: skip
    elif SIDES == 2:
        _walk_segment(
            program, column, z, values, steps, mask, states, ends, None, None, 1, 1,
            N, H, number, tokens, P, V, WIDTH_P, WIDTH_V, BLOCK, PRECISION, SIDES,
            MAP_K, BACKWARD,
        )  # fmt: skip


@triton.jit
def _walk_segment(
    program, column, z, values, steps, mask, states, ends, elapsed, passed, storing, side,
    N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    b, h, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    z = _side_of(z, storing, b, h, first)
    values, of_values = _side_of(values, side, b, h, first)
    p, v = tl.arange(0, WIDTH_P), column + tl.arange(0, WIDTH_V)
    places, inside = p[:, None] * V + v[None, :], (p < P)[:, None] & (v < V)[None, :]
    state = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    time = tl.full([], 0.0, tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=1):
        row = tt.walk(0, last - first, step, BLOCK, BACKWARD)
        block = (b * tl.cdiv(N, BLOCK) + (first + row) // BLOCK) * H + h
        kept = states + (block * SIDES + side) * (P * V) + places
        tl.store(kept, state.to(states.dtype.element_ty), mask=inside)
        if elapsed is not None:
            tl.store(elapsed + block, time, mask=column == 0)
        real = tt.real_tokens(mask, b, N, first + row, last, BLOCK)
        base, weight, _ = tt.features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        keep = real[:, None] & (v < V)[None, :]
        stored = tt.load_segment_rows((values + column, of_values), row, keep, BLOCK, WIDTH_V)
        if steps is not None:
            clock, total = _clock(steps, b, h, N, H, first + row, real, BLOCK)
            weight *= _since(clock) if BACKWARD else _until(clock, total)
            state *= tl.exp(-total)
            time += total
        state = tt.lowered_product(tl.trans(base), tt.scaled(stored, weight), state, PRECISION)
    tl.store(ends + (program.to(tl.int64) * SIDES + side) * (P * V) + places, state, mask=inside)
    if passed is not None:
        tl.store(passed + program, time, mask=column == 0)


@launched("number", "H")
def join_segments(
    ends, passed, start, starts, after, H, number, size,
    SIDES: tl.constexpr, BACKWARD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some entries of the sums before each segment, backward behind it, and over all of them.

    A gradient starts with that of the sum which the other side has stored.
    """
    sequence, side = tl.program_id(0).to(tl.int64), tl.program_id(2)
    other = SIDES - 1 - side if BACKWARD else side
    b, h = sequence // H, sequence % H
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = place < size
    sums = tl.zeros([WIDTH], tl.float32)
    if start is not None:
        sums += tl.load(start + (sequence * SIDES + other) * size + place, mask=exists, other=0.0)
    for step in tl.range(0, number):
        segment = (b * number + (number - 1 - step if BACKWARD else step)) * H + h
        offset = (segment * SIDES + side) * size
        tl.store(starts + offset + place, sums, mask=exists)
        if passed is not None:
            sums *= tl.exp(-tl.load(passed + segment))
        sums += tl.load(ends + offset + place, mask=exists, other=0.0)
    tl.store(after + (sequence * SIDES + other) * size + place, sums, mask=exists)


@triton.jit
def _block_of(program, N, H, number, tokens, BLOCK: tl.constexpr):
    """Sequence, head and first token of a block, and its segment."""
    blocks = tl.cdiv(N, BLOCK)
    b, h = (program // H // blocks).to(tl.int64), (program % H).to(tl.int64)
    start = program // H % blocks * BLOCK
    return b, h, start, (b * number + start // tokens) * H + h


@triton.jit
def _sum_of(
    sums, block, segment, side,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """The sum of a side before or behind a block, [P, V] in float32."""
    states, starts, elapsed = sums
    left = tl.full([], 1.0, tl.float32)
    if elapsed is not None:
        left = tl.exp(-tl.load(elapsed + block))
    near = tt.load_stacked(states, block * SIDES + side, P, V, WIDTH_P, WIDTH_V)
    return near + left * tt.load_stacked(starts, segment * SIDES + side, P, V, WIDTH_P, WIDTH_V)


@triton.jit
def _features_at(
    z, side, b, h, start, N, mask,
    P: tl.constexpr, WIDTH_P: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """Features of the tokens of a side from a token on, as base and factor; 1 / |z|."""
    real, rows = tt.real_tokens(mask, b, N, start, N, ROWS), _side_of(z, side, b, h, start)
    return tt.features_of(rows, 0, real, P, WIDTH_P, ROWS, PRECISION, FEATURE_MAP)


@triton.jit
def _rows_at(
    values, side, b, h, start, N, mask,
    V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Values of a side, or gradients of what it reads, from a token on."""
    real, rows = tt.real_tokens(mask, b, N, start, N, ROWS), _side_of(values, side, b, h, start)
    return tt.rows_of(rows, 0, real, V, WIDTH_V, ROWS, PRECISION)


@triton.jit
def _write(target, side, b, h, start, N, rows, C: tl.constexpr):
    """Write rows as the tokens of a side from a token on."""
    exists = tt.columns_of(tt.existing(start, N, rows.shape[0]), C, rows.shape[1])
    tt.store_segment_rows(_side_of(target, side, b, h, start), rows, 0, exists)


@triton.jit
def _times_of(steps, mask, b, h, N, H, start, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The time of all tokens of a block, of some of them, and all that passes."""
    real = tt.real_tokens(mask, b, N, start, N, BLOCK)
    clock, total = _clock(steps, b, h, N, H, start, real, BLOCK)
    mine = (part * ROWS + tl.arange(0, ROWS))[:, None] == tl.arange(0, BLOCK)[None, :]
    return clock, tl.sum(tl.where(mine, clock[None, :], 0.0), 1), total


@triton.jit
def _weights(near, far, part, PAST: tl.constexpr, LATER: tl.constexpr):
    """The kernel of the times of some readers and of all that they read, [rows, n].

    Readers read themselves, and other tokens of the block as is said.
    """
    row, column = part * near.shape[0] + tl.arange(0, near.shape[0]), tl.arange(0, far.shape[0])
    weight = tl.exp(-tl.abs(near[:, None] - far[None, :]))
    if not LATER:
        weight = tl.where(row[:, None] >= column[None, :], weight, 0.0)
    if not PAST:
        weight = tl.where(row[:, None] <= column[None, :], weight, 0.0)
    return weight


@launched()
def read_blocks(
    z, values, steps, mask,
    past, past_starts, past_elapsed, later, later_starts, later_elapsed, out,
    z_strides, value_strides, out_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Read earlier tokens for each token of a block, and later ones where these have sums."""
    parts: tl.constexpr = BLOCK // ROWS
    _read_block(
        tl.program_id(0) // parts, tl.program_id(0) % parts,
        (z, z_strides), (values, value_strides), (out, out_strides), steps, mask,
        (past, past_starts, past_elapsed), (later, later_starts, later_elapsed),
        N, H, number, tokens,
        P, V, WIDTH_P, WIDTH_V, BLOCK, ROWS, PRECISION, SIDES, MAP_Q, MAP_K, 0,
    )  # fmt: skip


@triton.jit
def _read_block(
    program, part, z, values, out, steps, mask, past, later, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    """Write the reads of some tokens of a block, the first by the features of the side READING."""
    b, h, start, segment = _block_of(program, N, H, number, tokens, BLOCK)
    clock, near_clock, total = _times_of(steps, mask, b, h, N, H, start, part, ROWS, BLOCK)
    weights = _weights(near_clock, clock, part, past[0] is not None, later[0] is not None)
    first = start + part * ROWS
    for reader in tl.static_range(SIDES):
        near, f_near, _ = _features_at(
            z, (READING + reader) % 2, b, h, first, N, mask, P, WIDTH_P, ROWS, PRECISION,
            MAP_K if (READING + reader) % 2 else MAP_Q,
        )  # fmt: skip
        far, f_far, _ = _features_at(
            z, 1 - (READING + reader) % 2, b, h, start, N, mask, P, WIDTH_P, BLOCK, PRECISION,
            MAP_Q if (READING + reader) % 2 else MAP_K,
        )  # fmt: skip
        stored = SIDES - 1 - reader
        rows = _rows_at(values, stored, b, h, start, N, mask, V, WIDTH_V, BLOCK, PRECISION)
        kernel_matrix = tt.times(near, tl.trans(far), PRECISION) * (weights * f_far[None, :])
        read = tt.times(kernel_matrix, rows, PRECISION)
        if past[0] is not None:
            sums = _sum_of(past, program, segment, stored, P, V, WIDTH_P, WIDTH_V, SIDES)
            read += tt.scaled(tt.times(near, sums, PRECISION), _since(near_clock))
        if later[0] is not None:
            sums = _sum_of(later, program, segment, stored, P, V, WIDTH_P, WIDTH_V, SIDES)
            read += tt.scaled(tt.times(near, sums, PRECISION), _until(near_clock, total))
        _write(out, reader, b, h, first, N, tt.scaled(read, f_near), V)


@launched()
def gradient_blocks(
    z, values, d_out, steps, mask,
    past, past_starts, past_elapsed, later, later_starts, later_elapsed,
    d_past, d_past_starts, d_past_elapsed, d_later, d_later_starts, d_later_elapsed,
    dz, d_values, ends, crossing,
    z_strides, value_strides, d_out_strides, dz_strides, d_value_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a block: one program for the features of each side, one for values.

    The gradients of the values are a scan of those of the outputs from the other end.
    """
    parts: tl.constexpr = BLOCK // ROWS
    part, kind = tl.program_id(0) % parts, tl.program_id(0) // parts % 3
    program = tl.program_id(0) // parts // 3
    z, values, d_out = (z, z_strides), (values, value_strides), (d_out, d_out_strides)
    dz, d_values = (dz, dz_strides), (d_values, d_value_strides)
    past, later = (past, past_starts, past_elapsed), (later, later_starts, later_elapsed)
    d_past = d_past, d_past_starts, d_past_elapsed
    d_later = d_later, d_later_starts, d_later_elapsed
    if kind == 0:
        _feature_gradients(
            program, part, z, values, d_out, steps, mask, past, later, d_past, d_later,
            dz, ends, crossing, N, H, number, tokens,
            P, V, WIDTH_P, WIDTH_V, BLOCK, ROWS, PRECISION, SIDES, MAP_Q, MAP_K, 0,
        )  # fmt: skip
    elif kind == 1:
        _feature_gradients(
            program, part, z, values, d_out, steps, mask, past, later, d_past, d_later,
            dz, ends, crossing, N, H, number, tokens,
            P, V, WIDTH_P, WIDTH_V, BLOCK, ROWS, PRECISION, SIDES, MAP_K, MAP_Q, 1,
        )  # fmt: skip
    else:
        _read_block(
            program, part, z, d_out, d_values, steps, mask, d_past, d_later, N, H, number, tokens,
            P, V, WIDTH_P, WIDTH_V, BLOCK, ROWS, PRECISION, SIDES, MAP_Q, MAP_K, 2 - SIDES,
        )  # fmt: skip


@triton.jit
def _feature_gradients(
    program, part, z, values, d_out, steps, mask, past, later, d_past, d_later,
    dz, ends, crossing, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, SIDES: tl.constexpr,
    NEAR_MAP: tl.constexpr, FAR_MAP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows behind the near side's features, of some tokens of a block.

    And what each of them adds to the gradients of the steps: as the later and as the earlier one of
    two tokens.
    """
    READS: tl.constexpr = SIDES == 2 or NEAR == 0
    STORES: tl.constexpr = SIDES == 2 or NEAR == 1
    FUTURE: tl.constexpr = later[0] is not None
    near_side: tl.constexpr = NEAR if SIDES == 2 else 0  # of values, gradients and sums
    far_side: tl.constexpr = SIDES - 1 - near_side
    b, h, start, segment = _block_of(program, N, H, number, tokens, BLOCK)
    first = start + part * ROWS
    near, f_near, inverse = _features_at(
        z, NEAR, b, h, first, N, mask, P, WIDTH_P, ROWS, PRECISION, NEAR_MAP
    )  # fmt: skip
    far, f_far, _ = _features_at(
        z, 1 - NEAR, b, h, start, N, mask, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
    )  # fmt: skip
    clock, near_clock, total = _times_of(steps, mask, b, h, N, H, start, part, ROWS, BLOCK)
    d_kernel = tl.zeros([ROWS, BLOCK], tl.float32)
    of_past = tl.zeros([ROWS, WIDTH_P], tl.float32)
    of_later = tl.zeros([ROWS, WIDTH_P], tl.float32)
    across = tl.full([], 0.0, tl.float32)  # what tokens before the block and behind it share
    if READS:
        d_read = _rows_at(d_out, near_side, b, h, first, N, mask, V, WIDTH_V, ROWS, PRECISION)
        rows = _rows_at(values, far_side, b, h, start, N, mask, V, WIDTH_V, BLOCK, PRECISION)
        weights = _weights(near_clock, clock, part, True, FUTURE)
        d_kernel += tt.times(d_read, tl.trans(rows), PRECISION) * weights
        sums = _sum_of(past, program, segment, far_side, P, V, WIDTH_P, WIDTH_V, SIDES)
        of_past += tt.times(d_read, tl.trans(sums), PRECISION)
        if steps is not None and part == 0:
            sums *= _sum_of(d_later, program, segment, near_side, P, V, WIDTH_P, WIDTH_V, SIDES)
            across += tl.sum(tl.sum(sums, 1), 0)
        if FUTURE:
            sums = _sum_of(later, program, segment, far_side, P, V, WIDTH_P, WIDTH_V, SIDES)
            of_later += tt.times(d_read, tl.trans(sums), PRECISION)
            if steps is not None and part == 0:
                sums *= _sum_of(d_past, program, segment, near_side, P, V, WIDTH_P, WIDTH_V, SIDES)
                across += tl.sum(tl.sum(sums, 1), 0)
    if STORES:
        stored = _rows_at(values, near_side, b, h, first, N, mask, V, WIDTH_V, ROWS, PRECISION)
        d_far = _rows_at(d_out, far_side, b, h, start, N, mask, V, WIDTH_V, BLOCK, PRECISION)
        weights = _weights(near_clock, clock, part, FUTURE, True)
        d_kernel += tt.times(stored, tl.trans(d_far), PRECISION) * weights
        sums = _sum_of(d_later, program, segment, far_side, P, V, WIDTH_P, WIDTH_V, SIDES)
        of_later += tt.times(stored, tl.trans(sums), PRECISION)
        if FUTURE:
            sums = _sum_of(d_past, program, segment, far_side, P, V, WIDTH_P, WIDTH_V, SIDES)
            of_past += tt.times(stored, tl.trans(sums), PRECISION)
    of_past = tt.scaled(of_past, _since(near_clock))
    of_later = tt.scaled(of_later, _until(near_clock, total))
    d_kernel *= f_far[None, :]
    if steps is not None:
        phi = tt.scaled(near, f_near)
        row, column = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        shared = tt.times(near, tl.trans(far), PRECISION) * tt.scaled(d_kernel, f_near)
        order = row[:, None] - column[None, :]
        shared = tl.where(order > 0, shared, tl.where(order < 0, -shared, 0.0))
        places = ends + ((b * N + first + tl.arange(0, ROWS)) * H + h) * 4 + NEAR * 2
        keep = tt.existing(first, N, ROWS)
        tl.store(places, tl.sum(phi * of_past, 1) + tl.sum(shared, 1), mask=keep)
        tl.store(places + 1, tl.sum(phi * of_later, 1), mask=keep)
        if READS:
            tl.store(crossing + program * SIDES + near_side, across, mask=part == 0)
    d_phi = tt.lowered_product(d_kernel, far, of_past + of_later, PRECISION)
    _write(dz, NEAR, b, h, first, N, tt.pull_back(near, f_near, inverse, d_phi, NEAR_MAP), P)


@launched()
def step_gradients(
    steps, mask, ends, crossing, d_steps, N, H, SIDES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradients of the steps of a block: of all pairs of tokens that have the step between them."""
    program = tl.program_id(0)
    b, h, start, _ = _block_of(program, N, H, 1, N, BLOCK)
    real = tt.real_tokens(mask, b, N, start, N, BLOCK)
    _, total = _clock(steps, b, h, N, H, start, real, BLOCK)
    places = (b * N + start + tl.arange(0, BLOCK)) * H + h
    exists = tt.existing(start, N, BLOCK)
    as_later = tl.zeros([BLOCK], tl.float32)
    as_earlier = tl.zeros([BLOCK], tl.float32)
    for side in tl.static_range(2):
        of_side = ends + places * 4 + side * 2
        as_later += tl.load(of_side, mask=exists, other=0.0)
        as_earlier += tl.load(of_side + 1, mask=exists, other=0.0)
    across = tl.full([], 0.0, tl.float32)
    for side in tl.static_range(SIDES):
        across += tl.load(crossing + program * SIDES + side)
    passing = tl.cumsum(as_later, 0, reverse=True) + tl.cumsum(as_earlier, 0) - as_earlier
    passing += across * tl.exp(-total)
    tl.store(d_steps + places, tl.where(real, -passing, 0.0), mask=exists)
