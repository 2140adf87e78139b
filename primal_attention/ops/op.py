"""Run an op fused where a backend supports its inputs, and register fused ops with PyTorch.

The eager form of an op is plain PyTorch. A *backend* may have a fused form for one kind of device:
:func:`fused` returns its outputs, or None, so that the caller falls back to the eager form.

Compilation and tensor subclasses need a fused op registered with ``torch.library``. The dispatcher
costs a call tens of microseconds; a plain call skips it. Gradients of gradients come from the eager
form.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from primal_attention.ops.replay import Plans
from primal_attention.precision import without_autocast

_LIBRARY: Any = torch.library.Library("primal_attention", "FRAGMENT")  # type: ignore[no-untyped-call]
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")  # the batches of torch.autograd.grad
_PLAIN = frozenset((Tensor, nn.Parameter))
_SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool"}

# The least number of elements of the first tensor for which an op runs fused, still to be measured:
# below it the host takes longer to launch the op than the device to compute it. Ops that replace
# many small launches have no such bound.
LARGE = {
    "landmark_index": 1,
    "layer": 1,
    "mean_j": 1,
    "moment": 1 << 22,
    "primal": 1,
    "scan": 1 << 23,
}


class Backward(NamedTuple):
    """Arguments of a backward pass beside the inputs."""

    kept: Sequence[Tensor]  # outputs of the forward pass
    grads: Sequence[Tensor | None]  # of the outputs that have one
    wanted: frozenset[str]  # names of the inputs whose gradients are wanted
    spent: bool  # whether what is kept may be overwritten


class FusedOp(ABC):
    """Fused form of an op for one kind of device.

    The inputs are a NamedTuple of tensors, numbers and strings. A missing tensor is None among the
    inputs and empty among the outputs.
    """

    name: ClassVar[str]
    inputs: ClassVar[Any]  # the NamedTuple
    differentiable: ClassVar[tuple[str, ...]] = ()  # inputs that may have a gradient
    outputs: ClassVar[tuple[str, ...]]  # those of the op first, then what its backward pass needs
    num_outputs: ClassVar[int] = 1  # those of the op, which have gradients
    first_kept: ClassVar[int] = 1  # outputs from here on are saved for the backward pass
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    @abstractmethod
    def supports(self, given: Any) -> bool:
        """Return whether this form takes the dtypes, sizes and options of these inputs."""

    @abstractmethod
    def forward(self, given: Any, *, keep: bool) -> Sequence[Tensor]:
        """Compute all outputs; what only a backward pass needs may be empty unless ``keep``."""

    @abstractmethod
    def empty(self, given: Any) -> Sequence[Tensor]:
        """Allocate contiguous, unwritten tensors like all outputs that are kept."""

    def backward(self, given: Any, call: Backward) -> dict[str, Tensor]:
        """Compute gradients by the names of the inputs, at least those that are wanted."""
        raise NotImplementedError(self.name)

    def eager(self, given: Any) -> Sequence[Tensor]:
        """Compute the outputs that have gradients in plain PyTorch."""
        raise NotImplementedError(self.name)

    def __init__(self) -> None:
        self._forwards, self._backwards = Plans(self._run_forward), Plans(self._run_backward)
        types = get_type_hints(self.inputs)
        fields = ", ".join(f"{_SCHEMA.get(kind, 'str')} {name}" for name, kind in types.items())
        self.registered = _registered(
            f"{self.name}_forward({fields}) -> ({', '.join(['Tensor'] * len(self.outputs))})",
            lambda *flat: _apart(self._compute(self.inputs(*flat), keep=True)),
            lambda *flat: _single(tuple(self.empty(self.inputs(*flat)))),
            self.devices,
        )
        if not self.differentiable:
            return
        gradients = ["Tensor"] * len(self.differentiable)
        fields += ", Tensor[] kept, Tensor?[] grads, bool[] wanted"
        self.registered_backward = _registered(
            f"{self.name}_backward({fields}) -> ({', '.join(gradients)})",
            lambda *flat: _apart(self._all_gradients(*flat)),
            lambda *flat: _single(tuple(self._empty_gradients(*flat))),
            self.devices,
        )
        torch.library.register_autograd(
            self.registered, self.gradients, setup_context=self._save_registered, lib=_LIBRARY
        )

    def __call__(self, given: Any) -> tuple[Tensor, ...]:
        """Compute the outputs of the op, in the graph of autograd where an input is."""
        if not _are_plain(given):
            outputs = self.registered(*given)
            return (outputs,) if isinstance(outputs, Tensor) else outputs[: self.num_outputs]
        tensors = (each for each in given if isinstance(each, Tensor))
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            recorded: tuple[Tensor, ...] = _Node.apply(self, *given)  # type: ignore[no-untyped-call]
            return recorded
        return tuple(self._compute(given, keep=False)[: self.num_outputs])

    def _compute(self, given: Any, *, keep: bool) -> Sequence[Tensor]:
        first = given[0]
        with without_autocast(first.device), device_of(first):
            if first.device.type in REPLAYED:
                outputs: Sequence[Tensor] = self._forwards(given, keep)
                return outputs
            return self.forward(given, keep=keep)

    def _run_forward(self, given: Sequence[Any], keep: bool) -> Sequence[Tensor]:
        return self.forward(self.inputs(*given), keep=keep)

    def save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        """Keep all inputs and the outputs that the backward pass needs."""
        ctx.options = [None if isinstance(each, Tensor) else each for each in inputs]
        ctx.set_materialize_grads(False)
        tensors = (each if isinstance(each, Tensor) else None for each in inputs)
        ctx.save_for_backward(*tensors, *output[self.first_kept :])

    def _save_registered(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        output = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*output[self.num_outputs :])
        self.save(ctx, inputs, output)

    def gradients(self, ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute gradients of all inputs; those that are differentiated by the eager form."""
        saved, count = ctx.saved_tensors, len(ctx.options)
        pairs = zip(saved[:count], ctx.options, strict=True)
        given = self.inputs._make(option if each is None else each for each, option in pairs)
        grads = [None if d is None or not d.numel() else d for d in d_outputs[: self.num_outputs]]
        needed = ctx.needs_input_grad[-count:]  # the op itself is an input of a node
        needs = dict(zip(self.inputs._fields, needed, strict=True))
        wanted = frozenset(name for name, need in needs.items() if need)
        if are_differentiated():
            found = self._differentiable_gradients(given, grads)
        elif _are_plain((*given, *grads)):
            found = self._gradients(given, Backward(saved[count:], grads, wanted, _is_let_go()))
        else:
            flags = [name in wanted for name in self.differentiable]
            computed = self.registered_backward(*given, list(saved[count:]), grads, flags)
            computed = (computed,) if isinstance(computed, Tensor) else computed
            found = dict(zip(self.differentiable, computed, strict=True))
        return tuple(found[name] if name in wanted else None for name in self.inputs._fields)

    def _gradients(self, given: Any, call: Backward) -> dict[str, Any]:
        first, (kept, grads, wanted, spent) = given[0], call
        with without_autocast(first.device), device_of(first):
            if first.device.type in REPLAYED:
                tensors = *given, *kept, *grads
                found: dict[str, Any] = self._backwards(tensors, len(kept), wanted, spent)
                return found
            return self.backward(given, call)

    def _run_backward(
        self, tensors: Sequence[Any], kept: int, wanted: frozenset[str], spent: bool
    ) -> dict[str, Tensor]:
        count = len(self.inputs._fields)
        given, rest = self.inputs(*tensors[:count]), tensors[count:]
        return self.backward(given, Backward(rest[:kept], rest[kept:], wanted, spent))

    def _differentiable_gradients(
        self, given: Any, grads: Sequence[Tensor | None]
    ) -> dict[str, Tensor | None]:
        names = self.differentiable

        def run(*tensors: Tensor | None) -> Sequence[Tensor]:
            return self.eager(given._replace(**dict(zip(names, tensors, strict=True))))

        with without_autocast(given[0].device):
            tensors = [getattr(given, name) for name in names]
            found = differentiable_gradients(run, tensors, grads)
            return dict(zip(names, found, strict=True))

    def _all_gradients(self, *flat: Any) -> list[Tensor]:
        """Compute gradients for the dispatcher: empty where they are not wanted."""
        given, kept, grads, flags = self.inputs(*flat[:-3]), *flat[-3:]
        pairs = zip(self.differentiable, flags, strict=True)
        wanted = frozenset(name for name, wants in pairs if wants)
        found = self._gradients(given, Backward(kept, grads, wanted, False))
        names = self.differentiable
        return [found[n] if n in wanted else given[0].new_empty(0) for n in names]

    def _empty_gradients(self, *flat: Any) -> Iterator[Tensor]:
        given, flags = self.inputs(*flat[:-3]), flat[-1]
        for name, wants in zip(self.differentiable, flags, strict=True):
            tensor = getattr(given, name) if wants else None
            yield given[0].new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


class _Node(torch.autograd.Function):
    """Any fused op in the graph of autograd, in a call that skips the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: FusedOp, *given: Any) -> tuple[Tensor, ...]:
        outputs = op._compute(op.inputs(*given), keep=True)
        op.save(ctx, given, outputs)
        ctx.op = op
        return tuple(outputs[: op.num_outputs])

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.op.gradients(ctx, *d_outputs)


class Backend(Protocol):
    """Fused forms of ops for one kind of device."""

    device_type: str

    def find(self, name: str) -> FusedOp | None:
        """Return the fused form of an op, or None."""


class Triton:
    """Fused forms in Triton; ``PRIMAL_FUSED=0`` in the environment turns them off."""

    device_type = "cuda"
    is_available = os.environ.get("PRIMAL_FUSED") != "0" and find_spec("triton") is not None

    def find(self, name: str) -> FusedOp | None:
        """Return the fused form of an op, or None; the first call imports them all."""
        if not self.is_available:
            return None
        from primal_attention.ops.triton.backend import OPS

        return OPS.get(name)


REPLAYED = {"cuda"}  # kinds of devices on which the passes of an op are recorded and repeated
BACKENDS: dict[str, Backend] = {Triton.device_type: Triton()}  # by the kind of device
_WHEN = ["large"]
_CHUNK: ContextVar[int | None] = ContextVar("_CHUNK", default=None)
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}  # of a chunk of tokens that eager forms walk over


@contextmanager
def chunk_elements(number: int) -> Iterator[None]:
    """Walk in chunks of about so many elements of the first rows, on every device."""
    token = _CHUNK.set(number)
    try:
        yield
    finally:
        _CHUNK.reset(token)


@contextmanager
def fused_ops(when: str) -> Iterator[None]:
    """Run ops fused ``never``, for ``large`` work (the default), or ``always``, on any device."""
    if when not in ("never", "large", "always"):
        raise ValueError(f"when must be 'never', 'large' or 'always', got {when!r}")
    _WHEN.append(when)
    try:
        yield
    finally:
        _WHEN.pop()


def may_run_fused(name: str, first: Tensor) -> bool:
    """Return whether to ask a backend, by the device and the number of elements of the input."""
    when = _WHEN[-1]
    if when == "never" or not (when == "always" or first.device.type in BACKENDS):
        return False
    if torch.compiler.is_compiling():
        plain = is_exporting()
    else:
        plain = is_transformed() or torch._C._is_tracing() or _counts_flops()
    return not plain and first.numel() >= (1 if when == "always" else LARGE[name])


def fused(name: str, given: Any) -> tuple[Tensor, ...] | None:
    """Compute an op by the first backend that supports the inputs; return None without one.

    Sizes, dtypes and options choose the form, never values.
    """
    first: Tensor = given[0]
    if not may_run_fused(name, first):
        return None
    always = _WHEN[-1] == "always"
    for backend in BACKENDS.values() if always else (BACKENDS[first.device.type],):
        op = backend.find(name)
        if op is not None and op.supports(given):
            return op(given)
    return None


def chunk_size(first: Tensor) -> int:
    """Choose how many tokens a chunk has: a multiple of 128, or all of them in a graph."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return first.shape[-2]
    chosen = _CHUNK.get()
    most = chosen or _ELEMENTS.get(first.device.type, _ELEMENTS["cuda"])
    unit = 16 if chosen else 128
    return max(most * first.shape[-2] // max(first.numel(), 1) // unit, 1) * unit


def is_exporting() -> bool:
    """Return whether ``torch.export`` follows this call; its own flag errs on Dynamo 2.11."""
    return bool(torch.compiler._is_exporting_flag)


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the device of the tensor."""
    here = not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(tensor.device)


def _are_plain(given: Sequence[Any]) -> bool:
    """Return whether no tracing, mode or subclass stands between a call and its arithmetic."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return all(type(x) in _PLAIN and not x.is_neg() for x in given if isinstance(x, Tensor))


def is_transformed() -> bool:
    """Return whether forward-mode AD or a transform of ``torch.func`` acts on operations."""
    forward_mode = forward_ad._current_level >= 0
    return forward_mode or torch._C._are_functorch_transforms_active()


def are_differentiated() -> bool:
    """Return whether a backward pass must be made of PyTorch's own operations.

    Its result is differentiated itself, or its gradients are batched (``is_grads_batched=True``).
    """
    if torch.compiler.is_compiling():  # a compiled graph has no gradients of gradients
        return False
    batched = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    return torch.is_grad_enabled() or is_transformed() or batched


def differentiable_gradients(
    forward: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Compute gradients by autograd over a plain forward, differentiable themselves if asked."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: where one input was made from another, the path between is no part of the op.
        own = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
        outputs = forward(*own)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grad_outputs, strict=True)
            if grad is not None and output.requires_grad
        ]
        wanted = [x for x in own if x is not None and x.requires_grad]
        grads = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
            if pairs and wanted
            else [None] * len(wanted)
        )
    return [next(grads) if x is not None and x.requires_grad else None for x in own]


def _counts_flops() -> bool:
    """Return whether ``torch.utils.flop_counter`` counts, which knows products of PyTorch alone."""
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    return any("FlopCounter" in type(mode).__name__ for mode in modes)


def _is_let_go() -> bool:
    """Return whether this backward pass frees the graph: what it kept may be overwritten."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def _registered(schema: str, function: Any, fake: Any, devices: tuple[str, ...]) -> Any:
    """Register an op by its schema, with a function for some kinds of devices and a fake one."""
    name, _, _ = schema.partition("(")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        _LIBRARY.impl(name, function, device.upper())
    torch.library.register_fake(f"primal_attention::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.primal_attention, name).default


def _single(tensors: tuple[Tensor, ...]) -> Any:
    """Return the tensors as an op of PyTorch does: one alone is no tuple."""
    return tensors if len(tensors) > 1 else tensors[0]


def _apart(tensors: Sequence[Tensor]) -> Any:
    """Make the tensors contiguous, none of them in the memory of another."""
    places: set[int] = set()
    results = []
    for each in map(Tensor.contiguous, tensors):
        place = each.untyped_storage().data_ptr()
        results.append(each.clone() if place in places or not each.numel() else each)
        places.add(place)
    return _single(tuple(results))
