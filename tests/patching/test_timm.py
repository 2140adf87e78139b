"""Vision transformers of timm."""

import pytest
import torch
from torch import nn

from primal_attention import ksvd_loss, patch, plan, unpatch
from primal_attention.patching import load_patched, save_patched

from . import torchvision_on_cpu  # noqa: F401 - before timm
from .families import MECHANISMS, B, assert_close

timm = pytest.importorskip("timm", reason="needs timm: pip install 'primal-attention[images]'")

SIZES = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 6}


def build(name="vit_tiny_patch16_224", **more):
    torch.manual_seed(0)
    model = timm.create_model(name, **SIZES | more, num_classes=5).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def images():
    return torch.randn(B, 3, 16, 16)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"],
)
def test_softmax_in_place_of_softmax_changes_nothing(name):
    model, x = build(name), images()
    y = model(x)
    assert_close(patch(model, "softmax", "all")(x), y)
    assert torch.equal(unpatch(model)(x), y)


@pytest.mark.parametrize("attention", MECHANISMS)
def test_mechanisms_train_save_and_are_undone(attention, tmp_path):
    model, x = build(), images()
    y = model(x)
    patch(model, attention).train()
    loss = model(x).square().mean()
    (loss + ksvd_loss(model) if attention == "primal" else loss).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    save_patched(model.eval(), tmp_path)
    assert torch.equal(load_patched(tmp_path, build())(x), model(x))
    assert torch.equal(unpatch(model)(x), y)


def test_lengths_come_from_the_patches():
    assert "max_tokens=17" in str(plan(build(), num_directions=3))
    assert "max_tokens=18" in str(plan(build("deit_tiny_distilled_patch16_224")))
    assert "max_tokens" not in str(plan(build(dynamic_img_size=True)))


@torch.no_grad()
def test_models_that_do_not_tell_how_many_patches_there_are():
    model, x = timm.create_model("pit_ti_224", num_classes=5).eval(), torch.randn(1, 3, 224, 224)
    assert "max_tokens" not in str(plan(model))
    y = model(x)
    assert_close(patch(model, "softmax", "all")(x), y)


@torch.no_grad()
def test_masks():
    attention = patch(build(), "softmax").blocks[-1].attn
    host = build().blocks[-1].attn
    x = torch.randn(B, 7, 24)
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    mask = real[:, None, None].expand(B, 1, 7, 7)
    assert_close(attention(x, attn_mask=mask)[real], host(x, attn_mask=mask)[real])
    with pytest.raises(ValueError, match="more than padding"):
        attention(x, attn_mask=torch.ones(7, 7, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="is_causal=True"):
        attention(x, is_causal=True)


@pytest.mark.parametrize("more", [{"qk_norm": True}, {"scale_attn_norm": True}])
def test_attentions_with_parts_of_their_own_are_refused(more):
    with pytest.raises(ValueError, match=r"blocks.1.attn: timm attention with .*norm"):
        patch(build(**more))


def test_other_models_of_timm_are_described():
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(1,), embed_dim=12, num_heads=(3,)
    )
    with pytest.raises(ValueError, match="WindowAttention at"):
        patch(model)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["softmax", "primal"])
def test_torch_fx_traces_a_patched_model(attention):
    model, x = patch(build(), attention, "all"), images()
    traced = torch.fx.symbolic_trace(model)
    assert_close(traced(x), model(x))
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    extractor = extraction.create_feature_extractor(model, ["blocks.0.attn", "blocks.1"])
    seen = {}
    for name in ("blocks.0.attn", "blocks.1"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
    model(x)
    features = extractor(x)
    assert features.keys() == seen.keys()
    for name, found in features.items():
        assert_close(found, seen[name])


def test_a_traced_model_trains():
    model, x = patch(build(), "primal", "all").train(), images()
    traced = torch.fx.symbolic_trace(model)
    (traced(x).square().mean() + ksvd_loss(traced)).backward()
    assert all(p.grad is not None for p in traced.parameters())


@pytest.mark.filterwarnings("ignore")  # both are deprecated, and tracing warns of sizes
def test_torch_jit_script_is_refused_by_name_and_trace_is_not():
    model, x = patch(build(), "primal", "all"), images()
    with pytest.raises(RuntimeError, match=r"patched layers \(primal\).*torch.jit.trace"):
        torch.jit.script(model)
    torch.jit.script(unpatch(model))
    with torch.no_grad():
        assert_close(torch.jit.trace(patch(model, "primal"), x)(x), model(x))
