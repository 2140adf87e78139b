"""What a transfer recovered, measured on held-out batches."""

from dataclasses import dataclass
from typing import NamedTuple

STAGES = ("patched", "initialised", "transferred")


class Errors(NamedTuple):
    """Squared error relative to the variance of the teacher's output: 0 is equal, 1 its mean."""

    patched: float  # before anything was done
    initialised: float  # after the initialisation from data
    transferred: float  # after training


@dataclass(frozen=True)
class DistillReport:
    """What ``distill`` recovered; print it.

    Attributes:
        layers: Errors of each replaced layer on the teacher's inputs, by name.
        outputs: Errors of the outputs of the whole model, on its own inputs throughout.
        steps: Training steps taken.
        num_valid: Real tokens in the held-out batches.
        initialisation_seconds: Time of the initialisation from data.
        training_seconds: Time of the training, its checks on held-out batches included.
    """

    layers: dict[str, Errors]
    outputs: Errors
    steps: int
    num_valid: int
    initialisation_seconds: float
    training_seconds: float

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("relative error", *STAGES)]
        rows += [
            (name, *(f"{error:.4f}" for error in errors))
            for name, errors in {**self.layers, "model outputs": self.outputs}.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ]
        return "\n".join(
            [
                *lines,
                f"held-out tokens: {self.num_valid:,}; initialisation "
                f"{self.initialisation_seconds:.0f} s, {self.steps} steps "
                f"{self.training_seconds:.0f} s",
            ]
        )
