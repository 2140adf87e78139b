"""Random layers keep the contract, and a layer that breaks it is found."""

import pytest
import torch

from primal_attention.attention.baselines.softmax import SoftmaxAttention

from .layers import draw, examine

CASES, AT_ONCE = 150, 10


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_random_layers_keep_the_contract(first):
    found = {number: examine(number) for number in range(first, first + AT_ONCE)}
    broken = {number: checker.violations for number, checker in found.items() if checker.violations}
    assert not broken, "".join(
        f"\npython -m tests.fuzz.layers --first {number} --cases 1  # {draw(number)}: {what}"
        for number, what in broken.items()
    )


class SeesPaddedKeys(SoftmaxAttention):
    def attend(self, q, k, v, mask, source_mask):
        return super().attend(q, k, v, mask, None)


class ViewsTheMask(SoftmaxAttention):
    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        if token_mask is not None:
            token_mask = token_mask.view(-1).view(token_mask.shape)
        return super().forward(x, context, token_mask=token_mask, context_mask=context_mask)


class WritesIntoTheInput(SoftmaxAttention):
    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        if token_mask is not None:
            x.data.masked_fill_(~token_mask[..., None], 0.0)
        return super().forward(x, context, token_mask=token_mask, context_mask=context_mask)


class MultipliesByTheMask(SoftmaxAttention):
    def forward(self, x, context=None, *, token_mask=None, context_mask=None):
        if token_mask is not None:
            x = x * token_mask[..., None]
        y = super().forward(x, context, context_mask=context_mask)
        return y if token_mask is None else y * token_mask[..., None]


class SeesTheLast(SoftmaxAttention):
    def attend(self, q, k, v, mask, source_mask):
        return super().attend(q, k, v + 0.1 * v[:, -1:], mask, source_mask)


class ForgetsTheFirst(SoftmaxAttention):
    def extend(self, q, k, v, state, mask):
        later = torch.arange(state.mask.shape[1]) > 0
        return super().extend(q, k, v, state._replace(mask=state.mask * later), mask)


class AveragesTheBatch(SoftmaxAttention):
    def attend(self, q, k, v, mask, source_mask):
        return super().attend(q - 0.1 * q.mean((0, 1)), k, v, mask, source_mask)


class NaNAlone(SoftmaxAttention):
    def attend(self, q, k, v, mask, source_mask):
        return super().attend(q, k, v, mask, source_mask) / min(q.shape[1] - 1, 1)


class Redraws(SoftmaxAttention):
    drawn = 0

    def attend(self, q, k, v, mask, source_mask):
        self.drawn += 1
        return super().attend(q, k, v * (1.0 + 1e-6 * self.drawn), mask, source_mask)


def violations_of(kind: type[SoftmaxAttention]) -> str:
    """What the cases of softmax attention find where all their layers are of that kind."""

    def build(case):
        torch.manual_seed(case.number)
        layer = kind(case.dim, case.num_heads, causal=case.causal, **case.options)
        return layer.to(case.dtype).train(case.training)

    numbers = [number for number in range(300) if draw(number).name == "softmax"]
    return "; ".join(what for number in numbers for what in examine(number, build).violations)


def test_a_right_layer_is_not_accused():
    assert violations_of(SoftmaxAttention) == ""


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (SeesPaddedKeys, "more padding"),
        (ViewsTheMask, "crashes with RuntimeError: view size is not compatible"),
        (WritesIntoTheInput, "an input was modified"),
        (MultipliesByTheMask, "not finite"),
        (SeesTheLast, "another future"),
        (ForgetsTheFirst, "decoding"),
        (AveragesTheBatch, "each sequence alone"),
        (NaNAlone, "out_proj.weight not finite"),
        (Redraws, "a second call gives other bits"),
    ],
)
def test_a_wrong_layer_is_found(kind, what):
    assert what in violations_of(kind)


def test_a_number_stands_for_one_case():
    assert draw(11) == draw(11) != draw(12)
    one, other = (draw(11).build().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
