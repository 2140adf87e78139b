"""The registry of what can be timed."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.attention import ATTENTIONS, PrimalAttention, build_attention, card_of
from primal_attention.attention.primal import PrimalTimeAttention
from primal_attention.benchmarking import layers

BOTH = "fwd+bwd"
_LANDMARKS = 10  # of a direction, as PrimalAttention has it


class LayerSizes(NamedTuple):
    """Sizes of one measurement; a batch of as many sequences as make up the tokens."""

    n: int
    batch: int
    dim: int
    heads: int
    directions: int
    dtype: str

    def input(self, device: torch.device) -> Tensor:
        """Draw a random input [B, N, D]."""
        dtype = getattr(torch, self.dtype)
        return torch.randn(self.batch, self.n, self.dim, device=device, dtype=dtype)


class TimedModule(NamedTuple):
    """A timed module on its device, and its input."""

    module: nn.Module
    x: Tensor
    leaves: tuple[Tensor, ...]  # what wants a gradient


class Job(NamedTuple):
    """One measurement to be made."""

    name: str  # of an entry
    sizes: LayerSizes
    kind: str
    compiled: bool


Build = Callable[["Entry", LayerSizes, Tensor], nn.Module]


class Entry(NamedTuple):
    """A line of the registry: a layer, or the op alone."""

    mechanism: str
    build: Build
    weights: str = ""
    causal: bool = False
    alone: bool = False  # the op alone, which has inputs of its own
    package: str = ""  # which has to be installed

    @property
    def name(self) -> str:
        """Name of the entry on the command line."""
        weights = "" if self.mechanism == "primal_time" else self.weights  # it has no others
        return "-".join(filter(None, (self.mechanism, weights, "causal" * self.causal)))

    def subject(self, sizes: LayerSizes, device: torch.device) -> TimedModule:
        """Build it; ModuleNotFoundError where a package is missing."""
        if self.package and find_spec(self.package) is None:
            raise ModuleNotFoundError(f"{self.package} is not installed", name=self.package)
        torch.manual_seed(0)
        x = sizes.input(device)
        module = self.build(self, sizes, x)
        if self.alone:
            module.to(device)
            inputs = [each for each in vars(module).values() if isinstance(each, Tensor)]
        else:
            module.to(device, x.dtype)
            inputs = [x.requires_grad_()]
        return TimedModule(module, x, (*inputs, *module.parameters()))


def _softmax(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    return layers.PackedSoftmax(sizes.dim, sizes.heads, causal=entry.causal)


def _primal(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    shape = sizes.dim, sizes.heads, sizes.directions
    if entry.mechanism == "primal_time":
        return layers.WithObjective(PrimalTimeAttention(*shape, causal=entry.causal))
    layer = PrimalAttention(*shape, weights=entry.weights, causal=entry.causal)
    return layers.WithObjective(layer)


def _op(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    return layers.OpAlone(x, sizes.heads, shared=entry.weights == "static")


def _released(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    S = sizes.directions
    return layers.ReleasedArithmetic(sizes.dim, sizes.heads, S, _LANDMARKS * S, causal=entry.causal)


def _registered(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    name = entry.mechanism
    options = {"max_tokens": sizes.n} if card_of(name).needs_max_tokens else {}
    forms = {"causal": True} if entry.causal else {}
    return layers.OutputsOf(build_attention(name, sizes.dim, sizes.heads, **forms, **options))


def _foreign(entry: Entry, sizes: LayerSizes, x: Tensor) -> nn.Module:
    """A layer of flash-linear-attention, which is always causal."""
    layer = {"fla_linear": "LinearAttention", "fla_gla": "GatedLinearAttention"}[entry.mechanism]
    kind = getattr(import_module("fla.layers"), layer)
    return layers.OutputsOf(kind(hidden_size=sizes.dim, num_heads=sizes.heads))


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("projections", lambda entry, sizes, x: layers.ProjectionFloor(x)),
        Entry("softmax", _softmax),
        Entry("softmax", _softmax, causal=True),
        Entry("primal", _primal, "static"),
        Entry("primal", _primal, "sampled"),
        Entry("primal", _primal, "dual"),
        Entry("primal", _primal, "static", causal=True),
        Entry("primal", _primal, "dual", causal=True),
        Entry("primal_time", _primal, "dual"),
        Entry("primal_time", _primal, "dual", causal=True),
        Entry("primal_op", _op, "sampled", alone=True),
        Entry("primal_op", _op, "static", alone=True),
        Entry("released", _released, "sampled"),
        Entry("released", _released, "static", causal=True),
        *(
            Entry(name, _registered, causal=causal)
            for name in ATTENTIONS
            if name not in ("primal", "primal_time", "softmax")
            for causal in ((False, True) if card_of(name).causal else (False,))
        ),
        Entry("fla_linear", _foreign, causal=True, package="fla"),
        Entry("fla_gla", _foreign, causal=True, package="fla"),
    )
}


def find_entries(names: Iterable[str]) -> list[str]:
    """Find the entries of these names; the name of a mechanism stands for all of its forms."""
    found = []
    for name in names:
        forms = [each for each, entry in ENTRIES.items() if name in (each, entry.mechanism)]
        if not forms:
            known = {entry.mechanism for entry in ENTRIES.values()} | set(ENTRIES)
            near = get_close_matches(name, known, cutoff=0.4) or sorted(known)
            raise ValueError(f"nothing called {name!r} can be timed; near: {', '.join(near)}")
        found += [form for form in forms if form not in found]
    return found
