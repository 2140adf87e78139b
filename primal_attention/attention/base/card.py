"""What is said of a mechanism in one line."""

from typing import NamedTuple


class Mechanism(NamedTuple):
    """What a mechanism is and can do; the table of the documentation is made from these."""

    paper: str  # Author et al., year
    complexity: str  # in the number N of tokens, e.g. "N^2"
    causal: bool = False  # whether it has a causal form
    cross: bool = False  # whether keys and values may come from another sequence
    decode: str = ""  # what the decode state holds; empty where there is none
    fused: str = ""  # the fused path it runs on, if any
