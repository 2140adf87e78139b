"""What patching has to know of a kind of foreign model."""

from abc import ABC, abstractmethod

from torch import nn

from primal_attention.patching.adapter import Change, PatchedAttention
from primal_attention.patching.projections import Parts


class Host(ABC):
    """One family of attention modules: how to recognise, read and replace them.

    Attributes:
        name: What the family is called in messages.
        takes_over: Modules beside the attention, by their path from its parent, whose work the new
            layer does: the output projection where the host keeps it elsewhere.
    """

    name: str
    takes_over: tuple[str, ...] = ()

    @abstractmethod
    def owns(self, module: nn.Module) -> bool:
        """Whether a module is an attention of this family."""

    @abstractmethod
    def read(self, module: nn.Module, ancestors: list[nn.Module]) -> Parts:
        """Its projections and use; a ValueError for what no mechanism can stand in for.

        The ancestors are the modules above it, from the model to its parent.
        """

    @abstractmethod
    def adapt(self, module: nn.Module, mechanism: nn.Module) -> PatchedAttention:
        """The mechanism behind the signature of the module."""

    def is_cross(self, module: nn.Module, parent: nn.Module) -> bool:
        """Whether it attends to another sequence than its own."""
        return False

    def settings(self, module: nn.Module, ancestors: list[nn.Module]) -> list[Change]:
        """Attributes of modules above the attention that must change, with their new values."""
        return []
