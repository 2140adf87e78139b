"""Exported graphs: the same outputs as the model, for sizes that the export has not seen."""

import torch
from torch.export import Dim

from primal_attention import patch
from primal_attention.models import Embedding, Encoder, SequenceClassifier

from .exports import (
    BOUNDED,
    TEXT,
    D,
    Layers,
    assert_exported,
    assert_same,
    primal,
    sequences,
)
from .families import VOCABULARY, bert, gpt2, vit

DYNAMIC = dict.fromkeys(("input_ids", "attention_mask"), BOUNDED)


def text(batch, tokens, *, padded=True, **more):
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    if padded:
        mask[-1, tokens // 2 + 1 :] = 0
    ids = torch.randint(3, VOCABULARY, (batch, tokens))
    return {"input_ids": ids, "attention_mask": mask} | more


def test_a_patched_encoder(tmp_path):
    model = patch(patch(bert(), "primal", 0), "primal", 1, weights="dual")
    cases = [text(2, 5), text(5, 37), text(1, 40), text(3, 8, padded=False)]
    assert_exported(model, text(3, 11), cases, DYNAMIC, tmp_path)


def test_a_patched_decoder(tmp_path):
    model = patch(patch(gpt2(), "primal", 0), "primal", 1, weights="dual")
    cases = [text(*size, use_cache=False) for size in [(2, 5), (5, 37), (1, 40)]]
    assert_exported(model, text(3, 11, use_cache=False), cases, DYNAMIC, tmp_path)


def test_a_patched_model_of_images(tmp_path):
    model = patch(vit(), "primal", "all")
    one, two, five = ({"pixel_values": torch.randn(batch, 3, 12, 12)} for batch in (1, 2, 5))
    assert_exported(model, two, [one, five], {"pixel_values": {0: Dim.DYNAMIC}}, tmp_path)


def classifier():
    encoder = Encoder([primal("sampled")], D, 17)
    return SequenceClassifier(Embedding(D, 40, num_channels=4), encoder, 3)


def test_a_classifier_of_sequences(tmp_path):
    def inputs(*size):
        return sequences(*size) | {"x": torch.randn(*size, 4)}

    dynamic = {"x": BOUNDED, "token_mask": BOUNDED}
    cases = [inputs(2, 5), inputs(5, 37), inputs(1, 2)]
    assert_exported(classifier(), inputs(3, 11), cases, dynamic, tmp_path)


@torch.no_grad()
def test_torch_export_is_saved_and_loaded(tmp_path):
    model = Layers(sampled=primal("sampled")).eval()
    shapes = {"x": TEXT, "token_mask": TEXT}
    program = torch.export.export(model, (), sequences(3, 11), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert "primal_attention" not in loaded.graph_module.code
    run = loaded.module()
    cases = [sequences(2, 5), sequences(5, 37)]
    assert_same(model, lambda each: run(**each), cases, 1e-6)
