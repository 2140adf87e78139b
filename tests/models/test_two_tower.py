"""Pairs of sequences through one tower."""

import pytest
import torch
import torch.nn.functional as F

from primal_attention import ksvd_loss, record_ksvd
from primal_attention.models import TwoTowerClassifier

from .small import MASK, D, K, N, gradients, randomise, symbols, tower, vectors

HIDDEN = 19


def pairs(model="primalformer", **options):
    return randomise(TwoTowerClassifier(tower(model, **options), K, hidden_dim=HIDDEN).double())


def test_the_head_reads_both_their_product_and_their_difference():
    model, a, b = pairs().eval(), vectors(seed=1), vectors(length=7, seed=2)
    mask_b = MASK[:, :7]
    f, g = model.tower(a), model.tower(b, token_mask=mask_b)
    weight, bias = model.hidden.weight, model.hidden.bias
    parts = weight.split(D, dim=1)
    summed = sum(z @ w.T for z, w in zip((f, g, f * g, f - g), parts, strict=True))
    expected = model.head(F.relu(summed + bias))
    torch.testing.assert_close(model(a, b, mask_b=mask_b), expected)
    assert expected.shape == (len(a), K)


def test_each_mask_belongs_to_its_sequence():
    model, a, b = pairs().eval(), vectors(seed=1), vectors(seed=2)
    mask_a, mask_b = MASK, MASK.flip(0)
    expected = model(a, b, mask_a=mask_a, mask_b=mask_b)
    a = torch.where(mask_a[..., None], a, float("nan"))
    b = torch.where(mask_b[..., None], b, float("inf"))
    assert torch.equal(model(a, b, mask_a=mask_a, mask_b=mask_b), expected)


def test_the_order_of_a_pair_counts():
    model, a, b = pairs().eval(), vectors(seed=1), vectors(seed=2)
    assert not torch.allclose(model(a, b), model(b, a))


@pytest.mark.parametrize("pooling", ["mean", "class_token", "flatten"])
def test_pairs_of_symbols(pooling):
    model = pairs(of_symbols=True, pooling=pooling)
    logits = model(symbols(seed=1), symbols(length=5, seed=2), mask_a=MASK)
    assert logits.shape == (len(MASK), K)
    assert all(g.isfinite().all() for g in gradients(model, logits.square().sum()).values())


@pytest.mark.parametrize("objective", ["released", "zero", "released_batch", "explained_energy"])
def test_the_objective_sees_both_runs(objective):
    model, a, b = pairs().train(), vectors(seed=1), vectors(length=7, seed=2)
    with record_ksvd(model):
        model(a, b, mask_a=MASK)
    both = ksvd_loss(model, objective=objective)
    by_name = gradients(model, both)

    alone = []
    for x, mask in ((a, MASK), (b, None)):
        model.tower(x, token_mask=mask)
        alone.append(ksvd_loss(model, objective=objective))
    model(a, b, mask_a=MASK)
    torch.testing.assert_close(ksvd_loss(model, objective=objective), alone[1])
    assert not torch.allclose(both, alone[1])
    if objective == "released_batch":  # whose square is taken after the mean over sequences
        return
    expected = torch.stack(alone).mean()
    torch.testing.assert_close(both, expected)
    torch.testing.assert_close(by_name, gradients(model, expected))


def test_bad_input_is_named():
    model = pairs()
    with pytest.raises(ValueError, match="as many sequences, got 3 and 2"):
        model(vectors(), vectors()[1:])
    with pytest.raises(ValueError, match="hidden_dim must be a positive integer, got 0"):
        TwoTowerClassifier(tower(), K, hidden_dim=0)
    with pytest.raises(ValueError, match=r"token_mask must have shape \[3, 4\]"):
        model(vectors(), vectors(length=4), mask_b=torch.ones(3, N, dtype=torch.bool))
