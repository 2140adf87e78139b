"""The card of a mechanism: all that other parts of the package ask of it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


def _never(layer: Any) -> bool:
    return False


class Mechanism(NamedTuple):
    """Describe a mechanism; the table of the documentation is made from these.

    Facts that depend on the options of a layer are functions of the layer.
    """

    paper: str  # Author et al., year
    complexity: str  # in the number N of tokens, e.g. "N^2"
    causal: bool = False  # has a causal form
    cross: bool = False  # keys and values may come from another sequence
    decode: str = ""  # content of the decode state; empty where there is none
    fused: str = ""  # the fused path it runs on, if any
    rotary: bool = False  # takes rotary positions
    needs_max_tokens: bool = False  # takes no more tokens than its option max_tokens says
    rank_bound: Callable[[Any], int] | None = None  # of its matrix, not causal; None: no bound
    no_matrix: Callable[[Any], str | None] | None = None  # why a layer has no attention matrix
    sums_over_queries: Callable[[Any], bool] = _never  # an output depends on the other queries
    softmax_start: Mapping[str, Any] | None = None  # options with which it begins as softmax
    causal_forms: tuple[Mapping[str, Any], ...] = ({},)  # options of each; models take the first
    causal_patch: Mapping[str, Any] = MappingProxyType({})  # options of a causal patched layer

    def largest_rank(self, layer: Any) -> int | None:
        """Return the upper bound of the rank of a layer's matrix; None if tokens alone bound it."""
        if layer.causal or self.rank_bound is None:  # a triangle of low rank has any rank
            return None
        return self.rank_bound(layer)

    def why_no_matrix(self, layer: Any) -> str | None:
        """Return the reason why a layer has no attention matrix; None if it has one."""
        return None if self.no_matrix is None else self.no_matrix(layer)
