"""A decoder gives what steps give, and on a GPU replays one graph for each token."""

import pytest
import torch

from primal_attention import build_attention

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
LAYERS = [
    ("primal", {"weights": "static", "feature_map": "elu"}),
    ("primal", {"weights": "static", "feature_map": "exponential"}),
    ("primal", {"weights": "dual"}),
    ("primal_time", {"rotary": True}),
    ("linear", {"decay": "learned"}),
    ("performer", {}),
    ("flow", {}),
    ("cosformer", {"max_tokens": 50}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_a_decoder_gives_what_a_full_pass_gives(name, options, device):
    torch.manual_seed(0)
    layer = build_attention(name, 32, 4, causal=True, **options).to(device).eval()
    x = torch.randn(3, 20, 32, device=device)
    mask = torch.rand(3, 8, device=device) > 0.3
    whole = layer(x, token_mask=torch.nn.functional.pad(mask, (0, 12), value=True))
    decoder = layer.decoder(3)
    for _ in range(2):
        y = [decoder.prefill(x[:, :8], token_mask=mask)]
        y += [decoder(x[:, t])[:, None] for t in range(8, 20)]
        torch.testing.assert_close(torch.cat(y, 1), whole, rtol=1e-4, atol=1e-5)
        decoder.reset()


@NO_GPU
@pytest.mark.gpu
def test_the_launches_of_a_token_are_one_graph():
    layer = build_attention("primal_time", 32, 4, causal=True).cuda().eval()
    decoder, x = layer.decoder(2), torch.randn(2, 32, device="cuda")
    decoder(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoder(x)
    launches = [event for event in profile.events() if "Launch" in event.name]
    assert len(launches) <= 4  # the graph, and copies of the token and of its output


def test_a_state_that_grows_is_refused():
    layer = build_attention("softmax", 32, 4, causal=True)
    with pytest.raises(ValueError, match="decoder needs a state of constant size, but k of Soft"):
        layer.decoder(2)
    with pytest.raises(ValueError, match="causal=True"):
        build_attention("linear", 32, 4).decoder(2)
