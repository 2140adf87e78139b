import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.chunks import masked, token_chunks


@pytest.mark.parametrize("elements", [1, 2000, 1 << 18])
@pytest.mark.parametrize("length", [1, 16, 17, 1000])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_pieces_cover_every_token_once_in_order(elements, length, batch, monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": elements, "cuda": 1})
    pieces = list(token_chunks(torch.empty(batch, length, 2, 5)))
    assert torch.cat([torch.arange(length)[piece] for piece in pieces]).tolist() == [*range(length)]
    longest = max(piece.stop - piece.start for piece in pieces)
    assert longest * batch * 10 <= max(elements, 16 * batch * 10)


def test_long_inputs_are_cut_by_default():
    assert len(list(token_chunks(torch.empty(1, 1 << 20, 1, 1)))) > 1


def test_masked_replaces_rather_than_multiplies():
    mask = torch.tensor([[True, False]])
    values = torch.tensor([1.0, float("nan")]).view(1, 2, 1, 1)
    assert masked(values, mask).flatten().tolist() == [1.0, 0.0]
    assert masked(values, None) is values
