"""The clauses of the attention contract, in the order of the report.

A clause is a function that takes the `Subject` and returns `Findings`. It raises `NotApplicable`
where it says nothing about the module; any other exception is a broken clause.
"""

from collections.abc import Callable

from primal_attention.testing.clauses.basics import (
    autocast,
    batch_independence,
    determinism,
    finite_values,
    input_dependence,
    shapes_and_dtypes,
    state_dict,
    training_mode,
)
from primal_attention.testing.clauses.causal import causality, decoding
from primal_attention.testing.clauses.derivatives import forward_mode, gradient_graphs, gradients
from primal_attention.testing.clauses.graphs import compiled, exported
from primal_attention.testing.clauses.masks import (
    cross_attention,
    left_padding,
    mask_holes,
    padded_positions,
    padding_invariance,
    poisoned_padding,
)
from primal_attention.testing.clauses.submodules import submodules
from primal_attention.testing.clauses.threads import threads
from primal_attention.testing.report import Findings
from primal_attention.testing.subject import Subject

Clause = Callable[[Subject], Findings]
CLAUSES: dict[str, Clause] = {
    "input dependence": input_dependence,
    "shapes and dtypes": shapes_and_dtypes,
    "padding invariance": padding_invariance,
    "left padding": left_padding,
    "padded positions": padded_positions,
    "mask holes": mask_holes,
    "poisoned padding": poisoned_padding,
    "batch independence": batch_independence,
    "causality": causality,
    "decoding": decoding,
    "determinism": determinism,
    "state dict": state_dict,
    "training mode": training_mode,
    "finite values": finite_values,
    "autocast": autocast,
    "compile": compiled,
    "export": exported,
    "cross-attention": cross_attention,
    "gradients": gradients,
    "gradient graphs": gradient_graphs,
    "forward mode": forward_mode,
    "threads": threads,
    "submodules": submodules,
}
