"""The attention modules of a model, in order, and which of them are meant."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from primal_attention.patching.hosts import HOSTS
from primal_attention.patching.hosts.host import Host, PatchedAttention, Projections
from primal_attention.patching.hosts.transformers_families import RefusedFamily

Layers = int | slice | str | Sequence[int] | Sequence[str]


class Site(NamedTuple):
    """An attention module in its model."""

    name: str  # its path
    module: nn.Module
    ancestors: list[nn.Module]  # from the model to the parent
    host: Host | None  # None where it is patched already

    @property
    def parent(self) -> nn.Module:
        """The module that holds it."""
        return self.ancestors[-1]

    def read(self) -> Projections:
        """Read its projections and use; raise where it cannot be replaced (again)."""
        if self.host is None:
            raise ValueError(f"{self.name} is patched already; unpatch(model) first")
        try:
            return self.host.read(self.module, self.ancestors)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    @property
    def is_cross(self) -> bool:
        """True where it attends to another sequence; indices do not count such modules."""
        if isinstance(self.module, PatchedAttention):
            return self.module.record.cross
        return self.host is not None and self.host.is_cross(self.module, self.parent)

    @property
    def is_local(self) -> bool:
        """True where it attends within a window, which no mechanism honours."""
        return self.host is not None and self.host.is_local(self.module)


def find_sites(model: nn.Module) -> list[Site]:
    """Find every attention that is known or patched, in the order of the model."""
    if any(host.owns(model) for host in HOSTS) or isinstance(model, PatchedAttention):
        raise ValueError(
            f"model is a {type(model).__name__} itself, which has no place to put a layer in; "
            "pass the model that holds it"
        )
    sites = list(_walk(model, "", []))
    if not sites:
        raise ValueError(_nothing_known(model))
    return sites


def patched_layers(model: nn.Module) -> dict[str, PatchedAttention]:
    """Return the patched layers of a model by their paths."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PatchedAttention) and module.patched
    }


def select(sites: list[Site], layers: Layers) -> list[Site]:
    """Select the sites that ``layers`` means, in order; raise a ValueError if it means none."""
    if layers == "all":
        return [site for site in sites if not site.is_local] or sites
    several = isinstance(layers, Sequence) and not isinstance(layers, str)
    each: Sequence[object] = layers if several else [layers]  # type: ignore[assignment]
    chosen = {site.name for one in each for site in _meant(sites, one)}
    if not chosen:
        raise ValueError(f"layers={layers!r} selects none of {len(sites)} attention layers")
    return [site for site in sites if site.name in chosen]


def _meant(sites: list[Site], one: object) -> list[Site]:
    if isinstance(one, str):
        found = [site for site in sites if fnmatchcase(site.name, one)]
        if not found:
            names = ", ".join(site.name for site in sites)
            raise ValueError(f"layers: no attention is called {one!r}; there are {names}")
        return found
    own = [site for site in sites if not site.is_cross]
    if isinstance(one, slice):
        return own[one]
    if not isinstance(one, int) or isinstance(one, bool):
        raise ValueError(
            f"layers must be an index, a list of them, a slice, 'all' or names, got {one!r}"
        )
    if not -len(own) <= one < len(own):
        raise ValueError(f"layers: {one} is out of range, the model has {len(own)} layers")
    return [own[one]]


def _walk(module: nn.Module, path: str, ancestors: list[nn.Module]) -> Iterator[Site]:
    above = [*ancestors, module]
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        host = next((host for host in HOSTS if host.owns(child)), None)
        if host is not None or (isinstance(child, PatchedAttention) and child.patched):
            yield Site(where, child, above, host)
        else:
            yield from _walk(child, where, above)


def _nothing_known(model: nn.Module) -> str:
    known = ", ".join(host.name for host in HOSTS if not isinstance(host, RefusedFamily))
    alike = {
        type(module).__name__: name
        for name, module in reversed(list(model.named_modules()))
        if name and any(word in type(module).__name__.lower() for word in ("attention", "attn"))
    }
    found = "; ".join(f"{kind} at {name}" for kind, name in sorted(alike.items()))
    seen = f"It has modules that look like attention: {found}" if alike else "It seems to have none"
    return (
        f"{type(model).__name__} has no attention that can be patched (known: {known}). {seen}; "
        "primal_attention.patching.register_host makes another family known"
    )
