"""Layers without memory: shapes of outputs and gradients on the meta device."""

import pytest
import torch

from primal_attention import ATTENTIONS, build_attention, ksvd_loss

VARIANTS = [
    *(("primal", {"weights": weights}) for weights in ("sampled", "static", "dual")),
    *((name, {}) for name in ATTENTIONS if name != "primal"),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_forward_and_backward(name, options, causal, training):
    if causal and (not ATTENTIONS[name].mechanism.causal or options == {"weights": "sampled"}):
        return
    layer = build_attention(name, 16, 2, causal=causal, **options).to("meta").train(training)
    x = torch.empty(2, 100, 16, device="meta", requires_grad=True)
    mask = torch.empty(2, 100, dtype=torch.bool, device="meta")
    for masks in ({}, {"token_mask": mask}):
        y = layer(x, **masks)
        assert (y.shape, y.device) == (x.shape, x.device)
        loss = y.sum() + (ksvd_loss(layer) if name == "primal" and training else 0.0)
        loss.backward()
        assert x.grad.shape == x.shape
