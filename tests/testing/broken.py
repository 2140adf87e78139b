"""Small attention modules that break the contract, each in one way."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .attentions import DIM, CausalLinear, CausalWithoutState, Linear, Softmax, State, valid


class Constant(Linear):
    """The output does not depend on the input."""

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        return 0.0 * x + self.out_proj.bias


class WrongDtype(Linear):
    """Computes in float32 and returns it."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, token_mask=token_mask).float()


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
        return State(*(value.to(self.q_proj.weight) for value in super().init_state(batch_size)))

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
