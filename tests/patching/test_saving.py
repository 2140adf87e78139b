"""Patched models on the disk: safetensors and JSON, read in a fresh process."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from primal_attention import ATTENTIONS, ksvd_loss, patch, unpatch
from primal_attention.patching import load_patched, save_patched
from primal_attention.patching.sites import patched_layers

from .families import FAMILIES, D, H, N, bert, gpt2, ids, llama, torch_encoder

LOAD = """
import sys, torch
from primal_attention.patching import load_patched
tokens, outputs = torch.load(sys.argv[1], weights_only=True), []
for place in sys.argv[3:]:
    model = load_patched(place)
    assert not model.training
    outputs.append(model(tokens)[0])
torch.save(outputs, sys.argv[2])
"""


def put_in_cache(folder, home, name):
    """As the hub's client leaves a model that it has downloaded."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", "snapshots/0123abcd"):
        (model / part).mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, model / "blobs" / str(number))
        (model / "snapshots/0123abcd" / file.name).symlink_to(f"../../blobs/{number}")
    (model / "refs/main").write_text("0123abcd")


def train(model, tokens):
    optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(tokens)[0].square().mean() + 0.1 * ksvd_loss(model)
        loss.backward()
        optimizer.step()
    return model.eval()


def test_what_was_trained_moved_or_downloaded_is_loaded_in_a_fresh_process_offline(tmp_path):
    tokens, models = ids(), {}
    for build in (bert, gpt2, llama):
        folder = tmp_path / build.__name__
        models[folder] = train(patch(build(), num_directions=5), tokens)
        save_patched(models[folder], folder)
    model = patch(bert().eval(), "primal", "all", num_directions=5)
    save_patched(model, tmp_path / "here")
    put_in_cache(tmp_path / "here", tmp_path / "home", "somebody/patched")
    moved = shutil.move(tmp_path / "here", tmp_path / "another place")
    models |= {moved: model, "somebody/patched": model}
    files = tmp_path / "tokens.pt", tmp_path / "outputs.pt"
    torch.save(tokens, files[0])
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    words = [sys.executable, "-c", LOAD, *files, *models]
    subprocess.run(words, check=True, timeout=120, cwd=tmp_path, env=cleared | offline)
    found = torch.load(files[1], weights_only=True)
    for outputs, model in zip(found, models.values(), strict=True):
        assert torch.equal(outputs, model(tokens)[0])


@pytest.mark.parametrize("name", ["nobody/nothing", "a/b/c", "/nowhere/at all"])
def test_a_model_that_is_not_there_is_not_looked_for_elsewhere(name, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1")
    with pytest.raises(FileNotFoundError, match=f"at {name}: there is no such folder.*downloads"):
        load_patched(name)


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in FAMILIES if not n.startswith("torch")])
def test_save_pretrained_is_enough(name, tmp_path):
    family = FAMILIES[name]
    model, tokens = patch(family.model(), "linear", "all"), family.tokens()
    mask = torch.ones(2, N, dtype=torch.bool)
    model.save_pretrained(tmp_path)
    loaded = load_patched(tmp_path)
    assert type(loaded) is type(model)
    assert list(patched_layers(loaded)) == list(patched_layers(model))
    assert torch.equal(family.run(loaded, tokens, mask), family.run(model, tokens, mask))
    assert not list(tmp_path.glob("*.bin"))


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_mechanism_comes_back(attention, tmp_path):
    model, tokens = patch(bert().eval(), attention), ids()
    save_patched(model, tmp_path)
    assert torch.equal(load_patched(tmp_path)(tokens)[0], model(tokens)[0])


@torch.no_grad()
def test_a_plain_module_comes_back_into_a_new_one(tmp_path):
    model, x = (
        patch(torch_encoder().eval(), "primal", "all", num_directions=3),
        torch.randn(2, N, D),
    )
    save_patched(model, tmp_path / "new" / "folder")
    with pytest.raises(
        ValueError, match=r"not of transformers; pass .*load_patched\(folder, model"
    ):
        load_patched(tmp_path / "new" / "folder")
    loaded = load_patched(tmp_path / "new" / "folder", torch_encoder().eval())
    assert torch.equal(loaded(x), model(x))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "model.safetensors",
        "primal_attention.json",
        "primal_attention.sha256",
    ]


def test_layers_of_different_mechanisms_and_options(tmp_path):
    model = patch(patch(gpt2().eval(), "flow", 0), "primal", 1, weights="dual", num_directions=3)
    save_patched(model, tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())["primal_attention"]
    assert [layer["attention"] for layer in description["layers"]] == ["flow", "primal"]
    loaded = load_patched(tmp_path)
    tokens = ids()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    generated = [each.generate(tokens, max_new_tokens=5) for each in (loaded, model)]
    assert torch.equal(*generated)


def test_a_loaded_model_can_be_saved_again_but_not_unpatched(tmp_path):
    model, tokens = patch(bert().eval(), "linear"), ids()
    save_patched(model, tmp_path / "one")
    loaded = load_patched(tmp_path / "one", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="loaded from a file"):
        unpatch(loaded)
    save_patched(loaded, tmp_path / "two")
    again = load_patched(tmp_path / "two")
    assert torch.equal(again(tokens)[0], loaded(tokens)[0])


def test_an_unpatched_model_says_nothing_of_it(tmp_path):
    model = unpatch(patch(bert()))
    assert not hasattr(model.config, "primal_attention")
    with pytest.raises(ValueError, match="no patched layer to save"):
        save_patched(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not say that anything was patched"):
        load_patched(tmp_path)


def test_errors_of_loading(tmp_path):
    with pytest.raises(FileNotFoundError, match="no patched model is at"):
        load_patched(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"primal_attention.json is missing"):
        load_patched(tmp_path, torch_encoder())
    (tmp_path / "primal_attention.json").write_text("{")
    with pytest.raises(ValueError, match="is not a whole JSON file"):
        load_patched(tmp_path, torch_encoder())
    (tmp_path / "primal_attention.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="not a description of patched layers"):
        load_patched(tmp_path, torch_encoder())
    save_patched(patch(torch_encoder(), layers=1), tmp_path)
    layer = nn.TransformerEncoderLayer(D, H, 17, batch_first=True)
    shallow = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with pytest.raises(ValueError, match=r"no attention at layers.1.self_attn; it has layers.0"):
        load_patched(tmp_path, shallow)


def test_options_that_are_no_json_are_refused_and_leave_no_files(tmp_path):
    from primal_attention.feature_maps import ExponentialFeatureMap

    model = patch(bert(), "linear", feature_map=ExponentialFeatureMap(D // H, 3))
    with pytest.raises(ValueError, match="no JSON value"):
        save_patched(model, tmp_path)
    assert not list(tmp_path.iterdir())


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("change", [flipped, lambda data: data[:-9], lambda data: b""])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "primal_attention.sha256"])
def test_damage_in_a_folder_is_named(tmp_path, name, change):
    save_patched(patch(bert().eval(), num_directions=3), tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(ValueError, match=str(tmp_path)) as raised:
        load_patched(tmp_path)
    assert "\n" not in str(raised.value)


def without_checksums(folder):
    """As save_pretrained leaves it."""
    (folder / "primal_attention.sha256").unlink()
    return folder


def described(folder, **options):
    path = folder / "primal_attention.json"
    description = json.loads(path.read_text())
    description["layers"][-1]["options"] |= options
    path.write_text(json.dumps(description))


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def other_weights(folder):
    save_patched(patch(torch_encoder(), "linear", "all"), folder / "other")
    shutil.copy(folder / "other" / "model.safetensors", folder)


def no_name(folder):
    (folder / "primal_attention.json").write_text(
        '{"format": "primal-attention patch 1", "layers": [{}]}'
    )


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (cut_weights, "model.safetensors is not a whole safetensors file"),
        (other_weights, "mechanism.* of the model|the model has no tensor"),
        (no_name, "KeyError: 'name'"),
        (lambda folder: described(folder, num_directions=4), r"shape \(.* the model has \("),
        (lambda folder: described(folder, num_directions=10**6), r"shape \(.* the model has \("),
        (lambda folder: described(folder, num_directions="x"), "is not this TransformerEncoder"),
        (lambda folder: described(folder, colour=1), "colour"),
    ],
)
def test_a_model_is_as_it_was_when_loading_into_it_fails(tmp_path, harm, told):
    save_patched(patch(torch_encoder(), "primal", "all", num_directions=3), tmp_path)
    harm(without_checksums(tmp_path))
    model, x = torch_encoder().eval(), torch.randn(2, N, D)
    before, modules = model(x), dict(model.named_modules())
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ValueError, match=told) as raised:
        load_patched(tmp_path, model)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())
    assert torch.equal(model(x), before)


def test_sizes_in_a_config_are_compared_before_memory_is_taken(tmp_path):
    save_patched(patch(bert().eval(), num_directions=3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["primal_attention"]["layers"][0]["options"]["num_directions"] = 10**9
    (without_checksums(tmp_path) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"not a patched BertModel to load so .*mismatched"):
        load_patched(tmp_path)
