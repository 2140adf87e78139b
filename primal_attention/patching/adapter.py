"""What stands in the place of a host's attention: a mechanism behind the host's signature."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn


class Change(NamedTuple):
    """An attribute of a module that patching changed, and what it was."""

    owner: nn.Module
    attribute: str
    old: Any


@dataclass
class Record:
    """How a layer was patched: enough to write it down, and to undo it."""

    host: str
    attention: str
    options: dict[str, Any]
    cross: bool  # whether it attends to another sequence than its own
    changes: list[Change] = field(default_factory=list)  # none where it came from a file


class PatchedAttention(nn.Module):
    """A mechanism of the registry in a foreign model.

    Subclasses translate the calls and masks of one kind of host.
    """

    record: Record  # set when the layer is put in place; no module of the model's

    def __init__(self, mechanism: nn.Module):
        super().__init__()
        self.mechanism: Any = mechanism

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` calls before it compiles a model."""
        raise RuntimeError(
            f"torch.jit.script cannot compile patched layers ({self.record.attention}), which are "
            "no TorchScript; use torch.jit.trace or torch.export, or unpatch(model)"
        )

    @property
    def causal(self) -> bool:
        """Whether each token sees only itself and those before it."""
        return bool(self.mechanism.causal)
