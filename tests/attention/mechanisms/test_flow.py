"""Flow attention against the paper, one flow at a time.

No other implementation is installed as a package.
"""

import pytest
import torch

from primal_attention.attention.baselines.flow import FlowAttention

from ..dense import MASKS, B, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

EPS = 1e-6


def build(**options):
    torch.manual_seed(0)
    return FlowAttention(D, H, **options).double().eval()


def flow(a, total):
    return (a + EPS) @ (total + EPS)


def bidirectional(q, k, v, head):
    """Every sink and every source by itself, then the matrix of all flows between them."""
    sinks, sources = q.sigmoid(), k.sigmoid()
    n, t = len(q), len(k)
    incoming = torch.stack([flow(sink, sources.sum(0)) for sink in sinks])
    outgoing = torch.stack([flow(source, sinks.sum(0)) for source in sources])
    refined_sources = sum(source / out for source, out in zip(sources, outgoing, strict=True))
    refined_sinks = sum(sink / into for sink, into in zip(sinks, incoming, strict=True))
    conserved_in = torch.stack([flow(sink, refined_sources) for sink in sinks])
    conserved_out = torch.stack([flow(source, refined_sinks) for source in sources])
    won = t * conserved_out.clamp(-1, 1).softmax(-1)[:, None] * v
    flows = (sinks @ sources.T) / incoming[:, None]
    return (conserved_in * n / t).sigmoid()[:, None] * (flows @ won)


def causal(q, k, v, head):
    """Take every sum up to the token, and means where the flows are refined."""
    sinks, sources = q.sigmoid(), k.sigmoid()
    into, out, conserved_in, strength, won, rows = [], [], [], [], [], []
    for i in range(len(q)):
        t = i + 1
        into.append(flow(sinks[i], sources[:t].sum(0)) / t)
        out.append(flow(sources[i], sinks[:t].sum(0)) / t)
        conserved_in.append(flow(sinks[i], sum(sources[j] / out[j] for j in range(t))) / t)
        conserved_out = flow(sources[i], sum(sinks[j] / into[j] for j in range(t))) / t
        strength.append(conserved_out.clamp(-1, 1).exp())
        won.append(t * strength[i] / sum(strength) * v[i])
        flows = [sinks[i] @ sources[j] / (t * into[i]) * won[j] for j in range(t)]
        rows.append(conserved_in[i].sigmoid() * sum(flows))
    return torch.stack(rows)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("published", [bidirectional, causal])
def test_against_the_paper(published, mask):
    layer = build(causal=published is causal)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published, x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


def test_cross_attention_against_the_paper():
    layer = build()
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS["holes"])
    want = by_sequence(layer, bidirectional, x, None, context, MASKS["holes"])
    assert_same_with_gradients(layer, got, want, [x, context])


def test_some_sources_are_clamped_and_some_are_not():
    """Conserved flows are 1 on average, which is where the published code clamps them."""
    q, k = randn(N, 5).sigmoid(), randn(N, 5, seed=1).sigmoid()
    incoming = (q + EPS) @ (k.sum(0) + EPS)
    conserved_out = (k + EPS) @ ((q / incoming[:, None]).sum(0) + EPS)
    assert 0 < (conserved_out > 1).sum() < N
    assert_close(conserved_out.mean(), torch.tensor(1.0, dtype=torch.float64), 1e-4)


def test_prefill_of_padded_prompts_then_steps_equals_the_full_pass():
    layer = build(causal=True)
    x, mask = randn(B, N, D), MASKS["holes"].clone()
    mask[:, 15:] = True
    want = layer(x, token_mask=mask)
    y, state = layer.prefill(x[:, :15], token_mask=mask[:, :15])
    outputs = [y]
    for x_t in x[:, 15:].unbind(1):
        y_t, state = layer.step(x_t, state)
        outputs.append(y_t[:, None])
    assert_close(torch.cat(outputs, dim=1), want)


@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_tensor_grows_linearly(causal):
    layer = FlowAttention(12, 2, causal=causal)
    assert largest_tensor(layer, 512) <= 4 * largest_tensor(layer, 128)


def test_errors():
    with pytest.raises(ValueError, match="a context does not go with causal=True"):
        build(causal=True)(randn(B, N, D), randn(B, N, D))
    with pytest.raises(ValueError, match="need a layer built with causal=True"):
        build().init_state(B)
