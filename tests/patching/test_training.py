"""Training patched models: the objectives, checkpointing, compiling, accelerate, LoRA."""

import sys

import pytest
import torch

from primal_attention import ksvd_loss, patch, record_ksvd, unpatch
from primal_attention.patching import load_patched, lora_config
from primal_attention.patching.sites import patched_layers

from .families import albert, assert_close, bert, gpt2, ids, llama, real_tokens

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET_GPT2 = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
BUILDERS = {
    "bert": lambda: bert(**QUIET),
    "gpt2": lambda: gpt2(**QUIET_GPT2),
    "llama": llama,
}


@pytest.fixture(params=BUILDERS)
def model(request):
    return patch(BUILDERS[request.param](), layers="all", num_directions=5).train()


def gradients(model, tokens):
    model.zero_grad()
    mask = real_tokens().long()
    loss = model(input_ids=tokens, attention_mask=mask)[0].square().mean() + ksvd_loss(model)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def test_the_objective_reaches_the_patched_layers(model):
    _, grads = gradients(model, ids())
    for name in patched_layers(model):
        mechanism = model.get_submodule(name).mechanism
        directions = ["w_e", "w_r"] if mechanism.weights == "sampled" else ["h_proj.weight"]
        if mechanism.decay is not None:
            directions += ["decay_proj.weight", "gate_proj.weight", "score_gain"]
        for parameter in (*directions, "raw_lambda", "score_proj.weight", "out_proj.weight"):
            assert grads[f"{name}.mechanism.{parameter}"].abs().max() > 0
    projections = [name for name in grads if name.endswith("q_proj.weight")]
    assert len(projections) == 2
    assert all(grads[name].abs().max() > 0 for name in projections)


def test_every_run_of_a_shared_layer_counts():
    model = patch(albert(), num_directions=5).train()
    model.config.num_hidden_layers = 3  # one layer, run three times
    (layer,) = patched_layers(model).values()
    model(ids())
    assert len(layer.mechanism.passes.runs) == 1
    with record_ksvd(model):
        model(ids())
    assert len(layer.mechanism.passes.runs) == 3
    assert ksvd_loss(model).requires_grad


@pytest.mark.filterwarnings("ignore:.*use_cache.*")
def test_gradient_checkpointing_gives_the_same_gradients(model):
    tokens = ids()
    loss, grads = gradients(model, tokens)
    model.gradient_checkpointing_enable()
    again, checkpointed = gradients(model, tokens)
    assert torch.equal(loss, again)
    assert grads.keys() == checkpointed.keys()
    for name, grad in grads.items():
        assert_close(checkpointed[name], grad, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_compiled_model_is_one_graph_and_gives_the_same(build):
    torch._dynamo.reset()
    model = patch(build().eval(), num_directions=5)
    inputs = {"input_ids": ids(), "attention_mask": real_tokens().long(), "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**inputs)[0], model(**inputs)[0])


def test_a_compiled_model_trains():
    torch._dynamo.reset()
    model, tokens = patch(bert(**QUIET), num_directions=5).train(), ids()
    expected = gradients(model, tokens)
    actual = gradients(torch.compile(model, backend="aot_eager"), tokens)
    assert_close(actual[0], expected[0])
    for name, grad in expected[1].items():
        assert_close(actual[1][f"_orig_mod.{name}"], grad, 1e-4)


def test_accelerate():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # another test may have begun one
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = patch(bert(**QUIET), num_directions=5).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    tokens = ids()
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(tokens)[0].square().mean() + 0.1 * ksvd_loss(model)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("build", [bert, llama])
def test_lora_on_a_patched_model(build):
    from peft import LoraConfig, get_peft_model

    model, tokens = patch(build().eval(), "linear", "all"), ids()
    y = model(tokens)[0].detach()
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert_close(tuned(tokens)[0], y)
    learned = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert len(learned) == 2 * 2 * 2
    tuned(tokens)[0].square().mean().backward()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    z = tuned(tokens)[0].detach()
    assert not torch.allclose(z, y, atol=1e-2)
    merged = tuned.merge_and_unload()
    assert_close(merged(tokens)[0], z)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("build", "target"), [(bert, "query"), (gpt2, "c_attn")])
def test_an_adapter_is_not_dropped_by_patching(build, target):
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(build(), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(ValueError, match="patch before adding adapters"):
        patch(tuned)


def test_lora_of_a_decoder_generates():
    from peft import LoraConfig, get_peft_model

    model, tokens = patch(llama().eval(), "flow", "all"), ids()
    tuned = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False)).eval()
    with_state = tuned.generate(input_ids=tokens, max_new_tokens=5)
    without = tuned.generate(input_ids=tokens, max_new_tokens=5, use_cache=False)
    assert torch.equal(with_state, without)


@pytest.mark.filterwarnings("ignore:.*tied.*", "ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("build", "attention", "directions"),
    [
        (lambda: bert(**QUIET), "primal", ["w_e", "w_r", "score_proj"]),
        (lambda: bert(**QUIET), "softmax_bn", ["norm"]),
        (lambda: gpt2(**QUIET_GPT2), "primal", ["h_proj", "gate_proj", "decay_proj"]),
        (llama, "primal", ["h_proj", "gate_proj", "decay_proj"]),
    ],
)
def test_new_parameters_train_beside_lora(build, attention, directions, tmp_path):
    """Adapters freeze everything else; the new parameters, random so far, are to be saved whole."""
    from peft import PeftModel, get_peft_model

    model, tokens = patch(build().eval(), attention), ids()
    model.save_pretrained(tmp_path / "base")
    twin = load_patched(tmp_path / "base")
    tuned = get_peft_model(model, lora_config(model, r=2)).train()
    learned = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert all(any(each in name for name in learned) for each in directions)
    assert any("lora_A" in name for name in learned)
    assert all("lora" in name or "modules_to_save" in name for name in learned)
    loss = tuned(tokens)[0].square().mean()
    (loss + 0.1 * ksvd_loss(tuned) if attention == "primal" else loss).backward()
    assert all(p.grad is not None for name, p in learned.items() if "pooler" not in name)
    with torch.no_grad():
        for parameter in learned.values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    z = tuned.eval()(tokens)[0].detach()
    tuned.save_pretrained(tmp_path / "adapter")
    assert_close(PeftModel.from_pretrained(twin, tmp_path / "adapter").eval()(tokens)[0], z)
    merged = tuned.merge_and_unload()
    assert_close(merged(tokens)[0], z)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(type(merged).from_pretrained(tmp_path / "merged")(tokens)[0], z)


def test_a_lora_config_takes_options_of_peft():
    model = patch(bert(), num_directions=5)
    config = lora_config(model, r=3, target_modules=["query"], modules_to_save=["pooler"])
    assert (config.r, config.target_modules) == (3, {"query"})
    assert config.modules_to_save == ["encoder.layer.1.attention.self.mechanism", "pooler"]
    with pytest.raises(ValueError, match="BertModel has no patched layer"):
        lora_config(bert())


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"lora_config needs .*primal-attention\[lora\]"):
        lora_config(bert())


def test_no_plan_of_tensor_parallelism_names_a_patched_layer():
    model = llama()
    whole = dict(model.tp_plan)
    patch(model, layers=-1)
    kept = {name: style for name, style in whole.items() if ".self_attn." not in name}
    assert 0 < len(model.tp_plan) == len(kept) < len(whole)
    assert model.tp_plan == kept
    assert model.model.tp_plan == {
        name.removeprefix("model."): kept[name] for name in kept if name.startswith("model.")
    }
    patch(model, layers=0)
    unpatch(model)
    assert model.tp_plan == whole
