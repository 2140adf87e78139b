"""Numbers of directions from spectra."""

import pytest
import torch

from primal_attention import PrimalAttention, build_attention, patch
from primal_attention.analysis import suggest_directions
from primal_attention.analysis.suggestion import Suggestion

D, N = 22, 37


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


@torch.no_grad()
def planted(rank):
    """Linear attention of the identity map over tokens of as many orthogonal kinds."""
    layer = build_attention("linear", D, 1, feature_map="identity").double()
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.copy_(torch.eye(D))
        projection.bias.zero_()
    kinds = torch.eye(D, dtype=torch.float64)[:rank]
    return layer, kinds.repeat(6, 1)[None]  # six tokens of each kind: equal singular values


@pytest.mark.parametrize("rank", [1, 2, 5, 7])
def test_a_planted_rank_is_found(rank):
    layer, x = planted(rank)
    assert suggest_directions(layer, x, energy=0.999).num_directions == {"LinearAttention": rank}
    half = -(-rank // 2)
    assert suggest_directions(layer, x, energy=0.5).layers[0].num_directions == half


def test_layers_that_need_more_than_a_head_can_have_stay():
    model = torch.nn.Sequential(*(build_attention("softmax", D, 11) for _ in range(2)))
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model[0], name).weight.mul_(20)  # sharp rows: a high rank
    found = suggest_directions(model, torch.randn(3, N, D))
    assert found.to_patch == ["1"]
    sharp, soft = found.layers
    assert sharp.limit == soft.limit == 2
    assert sharp.num_directions > 2 >= soft.num_directions
    assert sharp.explained < 0.9
    assert "2 directions explain" in sharp.reason
    assert suggest_directions(model, torch.randn(3, N, D), max_directions=N).to_patch == ["0", "1"]


def test_primal_layers_are_not_patched_again():
    found = suggest_directions(PrimalAttention(D, 2, 3), torch.randn(2, N, D))
    assert found.to_patch == []
    assert "Primal already" in str(found)


def test_it_says_what_patch_takes():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = BertModel(BertConfig(**sizes, intermediate_size=7, vocab_size=31))
    found = suggest_directions(model, {"input_ids": torch.randint(31, (2, N))})
    assert isinstance(found, Suggestion)
    assert len(found.layers) == 3
    patch(model, "primal", layers=found.to_patch, num_directions=found.layers[0].num_directions)
    assert "3 of 3 layers to patch" in str(found)


@pytest.mark.parametrize("energy", [0, -0.1, 1.01, float("nan"), "all"])
def test_energy_is_a_share(energy):
    with pytest.raises(ValueError, match="energy must be in"):
        suggest_directions(PrimalAttention(D, 2, 3), torch.randn(2, N, D), energy=energy)


@pytest.mark.parametrize("most", [0, 2.5])
def test_max_directions_is_a_number(most):
    with pytest.raises(ValueError, match="max_directions must be an integer"):
        suggest_directions(PrimalAttention(D, 2, 3), torch.randn(2, N, D), max_directions=most)
