"""Which mechanisms can stand in for the cross-attention of a host."""

from typing import Any


def check_crossing(attention: str, layer: Any) -> None:
    """Raise unless an output depends on its own query and the context alone.

    A host says neither which queries are padding nor which come later: a mechanism that sums over
    them would let a decoder see its future.
    """
    if not layer.mechanism.cross:
        raise ValueError(f"{attention} has no cross-attention")
    if layer.mechanism.sums_over_queries(layer):
        raise ValueError(
            f"the cross-attention of {attention} sums over all queries, padding and later tokens "
            "included, which the host does not tell apart; take another mechanism for it (primal "
            "with weights='sampled', linear, softmax_bn_sh), or patch the self-attentions by name"
        )
