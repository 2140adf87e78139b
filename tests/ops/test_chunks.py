import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.chunks import masked, piece_slices, token_chunks


@pytest.mark.parametrize("elements", [1, 2000, 1 << 18])
@pytest.mark.parametrize("length", [1, 16, 17, 1000])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_pieces_cover_every_token_once_in_order(elements, length, batch, monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": elements, "cuda": 1})
    pieces = list(token_chunks(torch.empty(batch, length, 2, 5)))
    assert torch.cat([torch.arange(length)[piece] for piece in pieces]).tolist() == [*range(length)]
    longest = max(piece.stop - piece.start for piece in pieces)
    assert longest * batch * 10 <= max(elements, 16 * batch * 10)


@pytest.mark.parametrize("elements", [1, 2000, 1 << 18])
@pytest.mark.parametrize("length", [0, 1, 17, 1000])
@pytest.mark.parametrize("batch", [0, 1, 3, 50])
def test_pieces_of_a_batch_are_whole_sequences_or_a_part_of_one(
    elements, length, batch, monkeypatch
):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": elements, "cuda": 1})
    seen = torch.zeros(batch, length, 2, 5)
    for sequences, tokens in piece_slices(seen):
        piece = seen[sequences, tokens]
        assert piece.shape[:2] == (1, piece.shape[1]) or piece.shape[1] == length
        assert piece.numel() <= max(elements, 16 * 10)
        piece += 1
    assert (seen == 1).all()


def test_long_inputs_are_cut_by_default():
    long = torch.empty(1, 1 << 22, 1, 1)
    assert len(list(token_chunks(long))) > 1
    assert len(list(piece_slices(long))) > 1


def test_masked_replaces_rather_than_multiplies():
    mask = torch.tensor([[True, False]])
    values = torch.tensor([1.0, float("nan")]).view(1, 2, 1, 1)
    assert masked(values, mask).flatten().tolist() == [1.0, 0.0]
    assert masked(values, None) is values
