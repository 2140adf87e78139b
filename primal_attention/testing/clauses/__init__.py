"""The clauses of the attention contract, in the order of the report.

A clause is a function that takes the `Subject` and returns `Findings`. It raises `NotApplicable`
where it says nothing about the module; any other exception is a broken clause.
"""

from collections.abc import Callable
from typing import NamedTuple

from primal_attention.testing.clauses.basics import (
    batch_independence,
    determinism,
    input_dependence,
    shapes_and_dtypes,
    state_dict,
)
from primal_attention.testing.clauses.causal import causality, decoding
from primal_attention.testing.clauses.context import cross_attention
from primal_attention.testing.clauses.derivatives import forward_mode, gradient_graphs, gradients
from primal_attention.testing.clauses.graphs import compiled, exported
from primal_attention.testing.clauses.masks import (
    left_padding,
    mask_holes,
    padded_positions,
    padding_invariance,
    poisoned_padding,
)
from primal_attention.testing.clauses.numerics import autocast, finite_values, training_mode
from primal_attention.testing.clauses.submodules import submodules
from primal_attention.testing.clauses.threads import threads
from primal_attention.testing.findings import Findings
from primal_attention.testing.subject import Subject


class Clause(NamedTuple):
    """A named promise and the function that tests it."""

    name: str
    check: Callable[[Subject], Findings]


CLAUSES = (
    Clause("input dependence", input_dependence),
    Clause("shapes and dtypes", shapes_and_dtypes),
    Clause("padding invariance", padding_invariance),
    Clause("left padding", left_padding),
    Clause("padded positions", padded_positions),
    Clause("mask holes", mask_holes),
    Clause("poisoned padding", poisoned_padding),
    Clause("batch independence", batch_independence),
    Clause("causality", causality),
    Clause("decoding", decoding),
    Clause("determinism", determinism),
    Clause("state dict", state_dict),
    Clause("training mode", training_mode),
    Clause("finite values", finite_values),
    Clause("autocast", autocast),
    Clause("compile", compiled),
    Clause("export", exported),
    Clause("cross-attention", cross_attention),
    Clause("gradients", gradients),
    Clause("gradient graphs", gradient_graphs),
    Clause("forward mode", forward_mode),
    Clause("threads", threads),
    Clause("submodules", submodules),
)
