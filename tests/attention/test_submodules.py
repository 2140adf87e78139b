"""Submodules and parameters act however they are wrapped, hooked, replaced or parametrised."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from primal_attention import ATTENTIONS, PrimalAttention, build_attention, ksvd_loss

H, D, N = 2, 8, 11
OPTIONS = {
    "primal static": {"weights": "static", "num_directions": 3},
    "primal static causal": {"weights": "static", "num_directions": 3, "causal": True},
    "primal sampled": {"num_directions": 2, "samples_per_direction": 3},
    "primal sampled e": {"num_directions": 3, "samples_per_direction": 2, "scores": "e"},
    "primal sampled r": {"num_directions": 3, "samples_per_direction": 2, "scores": "r"},
    "primal dual": {"weights": "dual", "num_directions": 3},
    "primal dual causal": {"weights": "dual", "num_directions": 3, "causal": True},
    "primal exponential": {"weights": "dual", "num_directions": 3, "feature_map": "exponential"},
    "performer": {"num_features": 4},
    "performer causal": {"num_features": 4, "causal": True},
    "linformer": {"max_tokens": 16, "num_projected": 4},
    "nystrom": {"num_landmarks": 4, "conv_kernel_size": 3},
    "reformer": {"max_tokens": 16, "bucket_size": 4, "num_hashes": 1},
    "longformer": {"window": 2, "num_global_tokens": 1},
    "softmax_bn": {"learnable_beta": True},
    "softmax_bn_sh": {"learnable_beta": True},
    "linear_bn": {"learnable_beta": True},
    "soft": {"num_landmarks": 4},
    "softmax_bn causal": {"learnable_beta": True, "causal": True},
    "softmax causal": {"causal": True},
    "linear causal": {"causal": True},
    "cosformer causal": {"causal": True},
    "flow causal": {"causal": True},
    "sparse causal": {"causal": True},
    "longformer causal": {"window": 2, "causal": True, "num_global_tokens": 1},
}
NAMES = [*OPTIONS, *(name for name in ATTENTIONS if name not in OPTIONS and name != "primal")]
names = pytest.mark.parametrize("name", NAMES)
primal = pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("primal")])


def make(name):
    torch.manual_seed(0)
    layer = build_attention(name.split()[0], D, H, **OPTIONS.get(name, {})).double()
    for parameter in layer.parameters():  # so that no bias is zero
        nn.init.normal_(parameter, std=0.5)
    return layer


def inputs():
    torch.manual_seed(1)
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[1, 7:] = False
    return torch.randn(3, N, D, dtype=torch.float64), mask


def outputs(layer):
    """Run the full pass with gradients and without, and a prefill with a step."""
    x, mask = inputs()
    torch.manual_seed(2)
    found = [layer(x, token_mask=mask)]
    with torch.no_grad():
        torch.manual_seed(2)
        found.append(layer(x, token_mask=mask))
        if getattr(layer, "causal", False) and hasattr(layer, "prefill"):
            y, state = layer.prefill(x[:, :-1], token_mask=mask[:, :-1])
            found += [y, layer.step(x[:, -1], state)[0]]
    return found


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def callable_modules(layer):
    """Submodules that can be called, as nn.ModuleList and the like cannot."""
    default = nn.Module.forward
    return {
        name: each
        for name, each in layer.named_modules()
        if name
        and getattr(type(each), "forward", default) is not default
        and not isinstance(each, nn.ModuleList)
    }


def replace(layer, name, module):
    parent, _, last = name.rpartition(".")
    setattr(layer.get_submodule(parent), last, module)


class WithAdapter(nn.Module):
    """A frozen projection and a product of two narrow ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x):
        return self.base(x) + x @ self.down.mT @ self.up.mT

    def merged(self):
        merged = copy.deepcopy(self.base)
        with torch.no_grad():
            merged.weight += self.up @ self.down
        return merged


@names
def test_adapters_act_and_train_and_merge(name):
    layer = make(name).eval()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    linears = [key for key, each in layer.named_modules() if type(each) is nn.Linear]
    for key in linears:
        replace(layer, key, WithAdapter(layer.get_submodule(key)))
    wrapped = outputs(layer)
    wrapped[0].square().sum().backward()
    silent = {f"{key}.{side}" for key in linears for side in ("up", "down")}
    silent -= {key for key, each in layer.named_parameters() if each.grad is not None}
    unused = {"primal sampled e": "k_proj", "primal sampled r": "q_proj"}.get(name, "none")
    assert all(key.startswith(unused) for key in silent)
    for key in linears:
        replace(layer, key, layer.get_submodule(key).merged())
    assert_same(outputs(layer), wrapped)


@names
def test_forward_hooks_run_and_may_replace(name):
    layer = make(name).eval()
    plain, run = outputs(layer), []
    modules = callable_modules(layer)
    for key, each in modules.items():
        each.register_forward_hook(lambda *_, key=key: run.append(key))
        each.register_forward_pre_hook(lambda *_, key=key: run.append(f"before {key}"))
    assert_same(outputs(layer), plain)
    assert set(run) == {*modules, *(f"before {key}" for key in modules)}
    layer = make(name).eval()
    x, mask = inputs()
    layer.out_proj.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(layer(x, token_mask=mask), 2 * plain[0])


@primal
def test_a_hook_of_score_proj_sees_the_scores_and_replaces_what_is_made_of_them(name):
    layer, seen = make(name).eval(), []
    expected = outputs(layer)
    layer.score_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    assert_same(outputs(layer), expected)
    assert set(seen) == {layer.score_proj.in_features}
    layer.score_proj.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    x, _ = inputs()
    torch.testing.assert_close(layer(x), layer.out_proj.bias.expand_as(x))


@names
def test_full_backward_hooks_run(name):
    layer, run = make(name).train(), set()
    x, mask = inputs()
    linears = {key for key, each in layer.named_modules() if type(each) is nn.Linear}
    for key in linears:
        layer.get_submodule(key).register_full_backward_hook(lambda *_, key=key: run.add(key))
    layer(x.requires_grad_(), token_mask=mask).square().sum().backward()
    unused = {"primal sampled e": {"k_proj"}, "primal sampled r": {"q_proj"}}.get(name, set())
    assert run >= linears - unused


@names
def test_hooks_of_all_modules_run(name):
    layer, run = make(name).eval(), set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: run.add(module))
    try:
        outputs(layer)
    finally:
        handle.remove()
    assert run >= set(callable_modules(layer).values())


class Doubled(nn.Module):
    def forward(self, parameter):
        return 2 * parameter


@names
def test_parametrised_parameters_act(name):
    layer, expected = make(name).eval(), make(name).eval()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter *= 2
    for key, _ in list(layer.named_parameters()):
        parent, _, last = key.rpartition(".")
        parametrize.register_parametrization(layer.get_submodule(parent), last, Doubled())
    assert_same(outputs(layer), outputs(expected))


@primal
def test_objectives_see_parametrised_parameters(name):
    layer, expected = make(name), make(name)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter *= 2
    for key, _ in list(layer.named_parameters()):
        parent, _, last = key.rpartition(".")
        parametrize.register_parametrization(layer.get_submodule(parent), last, Doubled())
    x, mask = inputs()
    values = []
    for each in (layer, expected):
        each(x, token_mask=mask)
        values.append(ksvd_loss(each))
    torch.testing.assert_close(*values)


@names
def test_weight_norm_changes_nothing(name):
    layer = make(name).eval()
    expected = outputs(layer)
    for each in list(layer.modules()):
        if type(each) is nn.Linear:
            parametrizations.weight_norm(each)
    assert_same(outputs(layer), expected)


@names
def test_functional_call_with_other_parameters(name):
    layer, other = make(name).eval(), make(name).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1
    x, mask = inputs()
    torch.manual_seed(2)
    found = functional_call(layer, dict(other.named_parameters()), (x,), {"token_mask": mask})
    assert_same([found], outputs(other)[:1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("reformer", "soft")])
def test_tied_projections_share_their_gradient(name):
    layer, expected = make(name), make(name)
    x, mask = inputs()
    expected.k_proj.load_state_dict(expected.q_proj.state_dict())
    layer.k_proj = layer.q_proj
    for each in (layer, expected):
        torch.manual_seed(2)
        each(x, token_mask=mask).square().sum().backward()
    both = expected.q_proj.weight.grad + expected.k_proj.weight.grad
    torch.testing.assert_close(layer.q_proj.weight.grad, both)


@names
def test_memory_that_comes_later(name):
    layer = make(name).eval()
    with torch.device("meta"):
        later = make(name).eval()
    later = later.to_empty(device="cpu")
    later.load_state_dict(layer.state_dict())
    assert_same(outputs(later), outputs(layer))


@names
def test_state_dict_hooks_run(name):
    layer, run = make(name), []
    layer.register_state_dict_post_hook(lambda *_: run.append("save"))
    layer.register_load_state_dict_post_hook(lambda *_: run.append("load"))
    layer.load_state_dict(layer.state_dict())
    assert run == ["save", "load"]


@names
@pytest.mark.filterwarnings("ignore")  # the old quantisation of PyTorch is deprecated
def test_dynamic_quantisation(name):
    layer = make(name).float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    assert not any(type(each) is nn.Linear for each in quantised.modules())
    x, mask = inputs()
    y = quantised(x.float(), token_mask=mask)
    assert y.isfinite().all()
    if "former" not in name or "lin" in name:  # reformer's buckets jump
        assert (y - layer(x.float(), token_mask=mask)).norm() < 0.2 * y.norm()
    if getattr(quantised, "causal", False) and hasattr(quantised, "prefill"):
        z, _ = quantised.prefill(x.float(), token_mask=mask)
        torch.testing.assert_close(z, y, rtol=1e-3, atol=1e-3)


@names
def test_offloaded_weights_are_loaded(name):
    accelerate = pytest.importorskip("accelerate")
    layer = make(name).eval()
    x, mask = inputs()
    with torch.no_grad():
        torch.manual_seed(2)
        expected = layer(x, token_mask=mask)
        model = nn.Sequential(layer)
        accelerate.cpu_offload(model, torch.device("cpu"))
        assert all(each.is_meta for each in model.parameters())
        torch.manual_seed(2)
        torch.testing.assert_close(layer(x, token_mask=mask), expected)
        if not (getattr(layer, "causal", False) and hasattr(layer, "prefill")):
            return
        if name == "primal static causal":
            with pytest.raises(RuntimeError, match="w_e and w_r"):
                layer.prefill(x, token_mask=mask)
        else:
            torch.testing.assert_close(layer.prefill(x, token_mask=mask)[0], expected)


@pytest.mark.parametrize("init", [True, False, "pissa"])
@names
def test_lora_of_all_linear_layers(name, init):
    peft = pytest.importorskip("peft")
    layer = make(name).float().eval()
    model = nn.ModuleDict({"attention": layer, "head": nn.Linear(D, 2)})
    linears = [key for key, each in model.named_modules() if type(each) is nn.Linear]
    config = peft.LoraConfig(target_modules=linears, r=2, init_lora_weights=init, lora_alpha=8)
    x, mask = (each.float() if each.is_floating_point() else each for each in inputs())

    def run(model):
        torch.manual_seed(2)
        return model["attention"](x, token_mask=mask)

    before = run(model)
    adapted = peft.get_peft_model(model, config).eval()
    after = run(adapted.base_model.model)
    after.square().sum().backward()
    trained = {
        key.split(".lora_")[0].rpartition(".")[2]
        for key, each in adapted.named_parameters()
        if "lora_" in key and each.grad is not None
    }
    unused = {"primal sampled e": "k_proj", "primal sampled r": "q_proj"}.get(name)
    wanted = {key.rpartition(".")[2] for key in linears} - {"head", unused}
    assert trained >= wanted
    if init is not False and name not in ("reformer",):
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    merged = run(adapted.merge_and_unload())
    if name not in ("reformer",):
        torch.testing.assert_close(merged, after, rtol=1e-3, atol=1e-3)


def test_folding_refuses_a_projection_that_would_not_act():
    layer = PrimalAttention(D, H, 3, weights="static")
    layer.score_proj.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match="score_proj is wrapped"):
        layer.fold()


@primal
def test_half_precision(name):
    layer = make(name).bfloat16().eval()
    x, mask = inputs()
    wanted = make(name).eval()(x, token_mask=mask)
    layer.score_proj.register_forward_hook(lambda module, args, out: None)
    found = layer(x.bfloat16(), token_mask=mask)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@primal
def test_autocast_reaches_a_called_score_proj(name):
    layer, seen = make(name).float(), []
    layer.score_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    x, mask = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.float(), token_mask=mask).float().sum().backward()
    assert seen == [torch.bfloat16]
    assert layer.score_proj.weight.grad.isfinite().all()


@primal
def test_compiled_with_a_replaced_score_proj(name):
    layer = make(name)
    layer.score_proj = WithAdapter(layer.score_proj)
    x, mask = inputs()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, token_mask=mask), layer(x, token_mask=mask))
