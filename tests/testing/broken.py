"""Small attention modules that break the contract, each in one way."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from .attentions import (
    DIM,
    CausalLinear,
    CausalWithoutState,
    KeepsLoss,
    Linear,
    Softmax,
    State,
    valid,
    wide,
)


class Constant(Linear):
    """The output does not depend on the input."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return self.out_proj(0.0 * x)


class WrongDtype(Linear):
    """Returns the dtype that it sums in."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, token_mask=token_mask).to(wide(x.dtype))


class KeysInNormaliser(Linear):
    """Masks the values only: padded keys, here those of the bias, stay in the normaliser."""

    def mask_keys(self, k: Tensor, real: Tensor) -> Tensor:
        return k


class ValuesOnly(KeysInNormaliser):
    """The same where padded tokens are not zeroed first, as libraries in use do it."""

    def clean(self, x: Tensor, real: Tensor) -> Tensor:
        return x


class CausalKeysInNormaliser(KeysInNormaliser, CausalLinear):
    """Its causal form, in which padding at the end does no harm and padding in front does."""


class SkipsMaskForBatchOfOne(Linear):
    """Ignores the mask where the batch holds one sequence."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return super().attend(x, real | (x.shape[0] == 1))


class BiasAtPadding(Linear):
    """Masks before the output projection, so that padded outputs are its bias."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        real = valid(x, token_mask)
        q, k, v = (proj(self.clean(x, real)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.features(q).masked_fill(~real, 0.0), self.features(k).masked_fill(~real, 0.0)
        return self.combine(q, k, v.masked_fill(~real, 0.0))


class MultipliesByMask(Linear):
    """Zeroes padding by a product: 0 times NaN is NaN."""

    def clean(self, x: Tensor, real: Tensor) -> Tensor:
        return x * real


class GradientAtPadding(Linear):
    """Right outputs; the gradient reaches padded tokens all the same."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        real = valid(x, token_mask)
        padding = x.nan_to_num(0.0, 0.0, 0.0).masked_fill(real, 0.0)
        leak = (padding - padding.detach()).sum(1, keepdim=True)
        return super().forward(x, token_mask=token_mask) + leak.masked_fill(~real, 0.0)


class CountsLengths(Linear):
    """Takes the mask for a length, so that holes shift it."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        real = valid(x, token_mask)
        prefix = torch.arange(x.shape[1], device=x.device)[:, None] < real.sum(1, keepdim=True)
        return self.attend(self.clean(x, prefix), prefix).masked_fill(~real, 0.0)


class NormalisesOverBatch(Linear):
    """Centres tokens by the mean of the batch."""

    def clean(self, x: Tensor, real: Tensor) -> Tensor:
        x = super().clean(x, real)
        return (x - x.sum((0, 1)) / real.sum().clamp(min=1)).masked_fill(~real, 0.0)


class LeaksFuture(CausalWithoutState):
    """Adds the mean of all real tokens."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return super().attend(x, real) + x.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(1)


class DividesByLength(CausalWithoutState):
    """Divides by the number of all real tokens, so that the past sees how many follow."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return super().attend(x, real) / real.sum(1, keepdim=True).clamp(1)


class NormaliseAtZero(Linear):
    """`F.normalize` of a token that is zero has a gradient of 1e12."""

    def __init__(self) -> None:
        super().__init__(bias=False)

    def features(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1) + 1.5


class RandomInEval(Linear):
    """Draws new random features in every call."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * torch.rand(DIM, device=x.device).to(x)


class StepForgets(CausalLinear):
    """The step lets its state decay, the full pass does not."""

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        return super().step(x_t, State(0.9 * state.kv, state.k))


class NarrowState(CausalLinear):
    """Keeps its state in the dtype of the module."""

    def init_state(self, batch_size: int) -> State:
        like = next(self.parameters())
        return State(*(value.to(like) for value in super().init_state(batch_size)))

    def scan(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        out, state = super().scan(q, k, v, state)
        return out, State(*(value.to(q) for value in state))


class UnsavedBuffer(Linear):
    """Random features in a buffer that the state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("draw", torch.rand(DIM), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.draw


class NaNInTraining(Linear):
    """Divides by the share of dropped tokens, which is zero."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        out = super().attend(x, real)
        return out / 0.0 if self.training else out


class BreaksGraph(Linear):
    """Asks for something in Python that a compiled graph cannot hold."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().attend(x, real)


class BranchesOnData(Linear):
    """Decides in Python by a value of the input."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        if x.abs().max().item() > 1e8:
            x = x / 1e8
        return super().attend(x, real)


class SensitiveToRounding(Linear):
    """A product of 100 inside a sine: rounding to bfloat16 turns it by radians."""

    def features(self, x: Tensor) -> Tensor:
        return torch.sin(1e2 * x) + 2


class ContextKeysInNormaliser(Softmax):
    """Masks the context by zeroing it, so that its keys are those of the bias."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        if context is None:
            return super().forward(x, token_mask=token_mask)
        context = context.masked_fill(~valid(context, context_mask), 0.0)
        return super().forward(x, context, token_mask=token_mask)


class IgnoresContext(Softmax):
    """Accepts a context and attends to the input."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        return super().forward(x, token_mask=token_mask)


class DetachedNormaliser(Linear):
    """Takes the normaliser for a constant in the backward pass."""

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norm = q @ k.sum(1)[..., None] + 1e-3
        return self.out_proj(q @ (k.mT @ v) / norm.detach())


def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v)


class Product(torch.autograd.Function):
    """A product that brings its own backward pass, and asks autograd where that needs a graph."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return product(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled():  # k, made from q, passes its own gradient on to q once more
            return torch.autograd.grad(product(q, k, v), (q, k, v), d, create_graph=True)
        return d @ (k.mT @ v).mT, v @ (d.mT @ q), k @ (q.mT @ d)


class CountsPathsTwice(Linear):
    """Differentiates by the inputs of an op, one of which is made from another."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        q = self.features(self.q_proj(x))
        k = self.mask_keys(self.features(self.k_proj(q)), real)
        return self.combine(q, k, self.v_proj(x).masked_fill(~real, 0.0))

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.out_proj(Product.apply(q, k, v) / (q @ k.sum(1)[..., None] + 1e-3))


class InfiniteCurvature(Linear):
    """Features whose second derivative is infinite at 0."""

    def __init__(self) -> None:
        super().__init__(bias=False)

    def features(self, x: Tensor) -> Tensor:
        return x.abs().pow(1.5) + 0.5


class Exponential(torch.autograd.Function):
    """exp, with a tangent that nobody has written yet."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return d * ctx.saved_tensors[0].exp()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return torch.zeros_like(tangent)


class DropsTangent(Linear):
    """Gives forward mode zeros."""

    def features(self, x: Tensor) -> Tensor:
        return Exponential.apply(x.clamp(max=5.0))


class KeepsMask(Linear):
    """Keeps the mask of the running call on the module, where another call finds it."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        self.real = valid(x, token_mask)
        return super().forward(x, token_mask=token_mask)

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().combine(q, k.masked_fill(~self.real, 0.0), v)


class KeepsLossOfAll(KeepsLoss):
    """Keeps the loss of the last pass of any thread."""

    def make_room(self) -> None:
        self.kept = SimpleNamespace()


class ReadsWeight(Linear):
    """Multiplies by the weight of a projection and does not call it."""

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norm = q @ k.sum(1)[..., None] + 1e-3
        return linear(q @ (k.mT @ v) / norm, self.out_proj.weight, self.out_proj.bias)


class CallsForward(Linear):
    """Calls the forward pass of a projection, so that no hook on it runs."""

    def combine(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norm = q @ k.sum(1)[..., None] + 1e-3
        return self.out_proj.forward(q @ (k.mT @ v) / norm)


class MergesWithoutGradients(Linear):
    """Two projections become one map where no gradients are asked for."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().attend(x, real)
        weight = self.out_proj.weight @ self.v_proj.weight
        bias = self.out_proj.weight @ self.v_proj.bias
        q, k = self.features(self.q_proj(x)), self.mask_keys(self.features(self.k_proj(x)), real)
        v = linear(x, weight, bias).masked_fill(~real, 0.0)
        norm = q @ k.sum(1)[..., None] + 1e-3
        return q @ (k.mT @ v) / norm + self.out_proj.bias
