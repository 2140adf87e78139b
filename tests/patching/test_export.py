"""Exported graphs: the same outputs as the model, for sizes that the export has not seen."""

import json

import pytest
import torch
from torch.export import Dim

from primal_attention import patch
from primal_attention.models import Embedding, Encoder, SequenceClassifier
from primal_attention.patching import export
from primal_attention.patching.export import export_onnx, export_program

from .exports import AXES, TOKENS, D, Layers, assert_exported, assert_same, layer, primal, sequences
from .families import VOCABULARY, bert, gpt2, vit

TEXT = dict.fromkeys(("input_ids", "attention_mask"), ("batch", TOKENS))


def text(batch, tokens, *, padded=True, **more):
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    if padded:
        mask[-1, tokens // 2 + 1 :] = 0
    ids = torch.randint(3, VOCABULARY, (batch, tokens))
    return {"input_ids": ids, "attention_mask": mask} | more


def test_a_patched_encoder(tmp_path):
    model = patch(patch(bert(), "primal", 0), "primal", 1, weights="dual")
    cases = [text(2, 5), text(5, 37), text(1, 40), text(3, 8, padded=False)]
    assert_exported(model, text(3, 11), cases, TEXT, tmp_path)


def test_a_patched_decoder(tmp_path):
    model = patch(patch(gpt2(), "primal", 0), "primal", 1, weights="dual")
    cases = [text(*size, use_cache=False) for size in [(2, 5), (5, 37), (1, 40)]]
    assert_exported(model, text(3, 11, use_cache=False), cases, TEXT, tmp_path)


def test_a_patched_model_of_images(tmp_path):
    model = patch(vit(), "primal", "all")
    one, two, five = ({"pixel_values": torch.randn(batch, 3, 12, 12)} for batch in (1, 2, 5))
    assert_exported(model, two, [one, five], {"pixel_values": ("batch",)}, tmp_path)


def classifier():
    encoder = Encoder([primal("sampled")], D, 17)
    return SequenceClassifier(Embedding(D, 40, num_channels=4), encoder, 3)


def test_a_classifier_of_sequences(tmp_path):
    def inputs(*size):
        return sequences(*size) | {"x": torch.randn(*size, 4)}

    dynamic = {"x": ("batch", TOKENS), "token_mask": ("batch", TOKENS)}
    cases = [inputs(2, 5), inputs(5, 37), inputs(1, 2)]
    assert_exported(classifier(), inputs(3, 11), cases, dynamic, tmp_path)


def test_a_program_has_no_ops_of_the_library_and_gives_the_same():
    model, dynamic = Layers(primal=primal("sampled")).eval(), {"x": AXES, "token_mask": AXES}
    program = export_program(model, sequences(3, 11), dynamic=dynamic)
    assert "primal_attention" not in program.graph_module.code
    run = program.module()
    assert_same(model, lambda each: run(**each), [sequences(2, 5), sequences(5, 37)], 1e-6)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
@torch.no_grad()
def test_torch_export_is_saved_and_loaded(tmp_path):
    model, axes = Layers(primal=primal("sampled")).eval(), {0: Dim("batch"), 1: Dim("tokens")}
    shapes = {"x": axes, "token_mask": axes}
    program = torch.export.export(model, (), sequences(3, 11), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert "primal_attention" not in loaded.graph_module.code
    run = loaded.module()
    cases = [sequences(2, 5), sequences(5, 37)]
    assert_same(model, lambda each: run(**each), cases, 1e-6)


def test_limits_of_the_graph_are_asked_for_and_written_down(tmp_path):
    import onnx

    model, path = Layers(nystrom=layer("nystrom", num_landmarks=7)).eval(), tmp_path / "model.onnx"
    inputs = sequences(2, 5, masked=False)
    with pytest.raises(ValueError, match="max=7"):  # longer inputs go another way
        export_onnx(model, inputs, path, dynamic={"x": AXES})
    assert not path.exists()
    axes = ("batch", Dim("tokens", min=2, max=7))
    export_onnx(model, inputs, path, dynamic={"x": axes})
    (limits,) = onnx.load(path).metadata_props
    assert json.loads(limits.value) == {"batch": [2, None], "tokens": [2, 7]}


def test_an_output_may_be_called_like_an_operation(tmp_path):
    model = Layers()
    model.forward = lambda x: {"mul": x * 2 + 1}
    assert_exported(model, {"x": torch.randn(2, 3)}, [{"x": torch.randn(2, 3)}], None, tmp_path)


def test_large_weights_are_written_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_LARGEST_FILE", 0)
    model, inputs = Layers(static=primal("static")), sequences(2, 5, masked=False)
    assert_exported(model, inputs, [sequences(2, 5, masked=False)], None, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("before")

    def fail(self, path, **options):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr("torch.onnx.ONNXProgram.save", fail)
    model = Layers(softmax=layer("softmax")).eval()
    with pytest.raises(OSError, match="no space"):
        export_onnx(model, sequences(2, 5), path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("model.onnx", "before")
    ]


def test_what_cannot_be_exported_is_named():
    inputs, model = sequences(2, 5), Layers(primal=primal("static")).eval()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        export_program(model.train(), inputs)
    model.eval()
    with pytest.raises(ValueError, match=r"'y', which is no tensor of inputs: \['x', 'token_mask'"):
        export_program(model, inputs, dynamic={"y": AXES})
    with pytest.raises(ValueError, match=r"dynamic\['x'\] must name at most the 3 axes"):
        export_program(model, inputs, dynamic={"x": (*AXES, None, None)})
    with pytest.raises(ValueError, match="'tokens' is given in two ways"):
        export_program(
            model, inputs, dynamic={"x": AXES, "token_mask": ("batch", Dim("tokens", max=9))}
        )


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"primal-attention\[onnx\]"):
        export_onnx(Layers(), {}, tmp_path / "model.onnx")
