"""The module under test: fresh copies of it and inputs that fit it."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from primal_attention.testing.probes import SEED, Probe, forward, real_only
from primal_attention.testing.report import Findings

_ASLEEP = 1e-3
_AWAKE = 0.1
_EXACT_DIM = 64


class Subject:
    """The attention under test.

    Clauses work on copies of the module, never on the module itself. The copies are in eval mode
    and float32, and parameters that start at (almost) zero, such as a zero-initialised output
    projection, are given small random values: otherwise the output or its gradients would be 0
    and the comparisons would hold of themselves. `copy(as_built=True)` leaves them as they were.

    Attributes:
        causal: Whether the module is to be held to causality.
        dim: The number of channels D of a token.
        device: Where the module lives; all inputs are made there.
        factory: Builds a fresh module, where the caller gave a factory.
        objective: Makes a term of the loss of what the module kept of its last training pass.
    """

    def __init__(
        self,
        layer_or_factory: nn.Module | Callable[[], nn.Module],
        *,
        causal: bool,
        dim: int | None,
        objective: Callable[[nn.Module], Tensor] | None = None,
    ) -> None:
        layer, self.factory = _take(layer_or_factory)
        self.objective = objective
        self._as_built = layer.float().eval()
        self._as_built.zero_grad(set_to_none=True)
        self.causal = causal
        self.dim = _find_dim(layer) if dim is None else dim
        tensors = chain(layer.parameters(), layer.buffers())
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._awake = copy.deepcopy(self._as_built)
        self.was_asleep = _wake_zero_parameters(self._awake)

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return type(self._awake).__name__

    @property
    def exemptions(self) -> Mapping[str, str]:
        """The clauses that the module opts out of, each with its reason."""
        return getattr(self._awake, "contract_exemptions", {})

    @property
    def takes_context(self) -> bool:
        """True if the module attends to another sequence."""
        return self.no_context_because is None

    @cached_property
    def no_context_because(self) -> str | None:
        """Why the module takes no context; None where it does."""
        x, context = self.tokens(4, 7), self.tokens(4, 11, seed=1)
        try:
            forward(self.copy(), x, context=context)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                return str(error)
            raise
        return None

    def findings(self, detail: str) -> Findings:
        """Findings whose bounds grow with the rounding of a sum over the channels."""
        return Findings(detail, rounding=max(1.0, math.sqrt(self.dim / _EXACT_DIM)))

    def copy(self, dtype: torch.dtype = torch.float32, *, as_built: bool = False) -> nn.Module:
        """A copy with every parameter away from zero, or with the parameters as they were given."""
        layer = copy.deepcopy(self._as_built if as_built else self._awake)
        return layer if dtype is torch.float32 else layer.to(dtype)

    def fresh(self) -> nn.Module | None:
        """Build a module from other random numbers; None without a factory."""
        if self.factory is None:
            return None
        torch.manual_seed(SEED + 1)
        return self.factory().float().eval()

    def tokens(self, batch: int, length: int, *, seed: int = 0) -> Tensor:
        """Standard normal tokens [batch, length, dim], the same for the same seed."""
        generator = torch.Generator().manual_seed(SEED + seed)
        x = torch.randn(batch, length, self.dim, generator=generator, dtype=torch.float32)
        return x.to(self.device)

    def prefix_mask(self, lengths: Sequence[int], width: int | None = None) -> Tensor:
        """Mask [B, width] of sequences whose first `lengths[b]` tokens are real."""
        positions = torch.arange(width or max(lengths), device=self.device)
        return positions < torch.tensor(lengths, device=self.device)[:, None]

    def probe(self, mask: Tensor) -> Probe:
        """A probe with a mask of tokens; the gradient of its output is 0 at padding."""
        x, cotangent = self.tokens(*mask.shape), self.tokens(*mask.shape, seed=1)
        return Probe(self.copy(), x, real_only(cotangent, mask), mask)

    def probes(self, mask: Tensor) -> Iterator[tuple[str, Probe]]:
        """A probe without a mask and one with it, each with words for it."""
        masked = self.probe(mask)
        cotangent = self.tokens(*mask.shape, seed=1)
        yield "without a mask", masked._replace(cotangent=cotangent, token_mask=None)
        yield "with a mask", masked


@contextmanager
def isolated() -> Iterator[None]:
    """Seeded random numbers and gradients inside; outside, nothing of the caller's has changed.

    The tensors are too small to share: one thread is as fast as several on an idle machine, and
    several times faster on a busy one.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if in_use else 0)
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _take(
    layer_or_factory: nn.Module | Callable[[], nn.Module],
) -> tuple[nn.Module, Callable[[], nn.Module] | None]:
    if isinstance(layer_or_factory, nn.Module):
        try:
            return copy.deepcopy(layer_or_factory), None
        except Exception as error:
            raise ValueError(
                f"layer_or_factory is a {type(layer_or_factory).__name__} that cannot be deep-"
                f"copied ({type(error).__name__}: {error}); pass a function that builds it"
            ) from error
    if not callable(layer_or_factory):
        raise TypeError(
            "layer_or_factory must be an nn.Module or a function without arguments that returns "
            f"one, got {layer_or_factory!r}"
        )
    layer = layer_or_factory()
    if not isinstance(layer, nn.Module):
        raise TypeError(f"layer_or_factory must return an nn.Module, it returned {layer!r}")
    return layer, layer_or_factory


def _find_dim(layer: nn.Module) -> int:
    dim = getattr(layer, "dim", None)
    if isinstance(dim, int):
        return dim
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    raise ValueError(
        f"dim could not be found: {type(layer).__name__} has neither an integer attribute dim nor "
        "an nn.Linear; pass dim="
    )


def _wake_zero_parameters(layer: nn.Module) -> bool:
    asleep = [p for p in layer.parameters() if p.is_floating_point() and _is_asleep(p)]
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in asleep:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(_AWAKE * noise)
    return bool(asleep)


def _is_asleep(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and bool(parameter.detach().abs().max() < _ASLEEP)
