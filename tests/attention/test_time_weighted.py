"""The time-weighted layer against its formulas, written out with N x N matrices."""

import math

import pytest
import torch
from torch.nn import functional as F

from primal_attention import PrimalAttention, build_attention, ksvd_loss
from primal_attention.ops.op import chunk_elements

from .dense import MASKS, B, C, D, H, N, S, assert_close, assert_same_with_gradients, randn

TIME = {"weights": "dual", "decay": "learned", "feature_map": "unit_elu"}
FULL = {**TIME, "score_norm": True, "gate": True, "rotary": True}
OPTIONS = [
    FULL,
    TIME,
    {**FULL, "rotary": False, "scores": "e"},
    {**FULL, "decay": "fixed", "feature_map": "cosine", "scores": "r"},
    {**FULL, "decay": None},
    {**TIME, "decay": None, "score_norm": True},
]
HALF = C + C % 2  # rotary positions take an even head dimension
DIM = H * HALF


def build(causal=False, seed=0, dim=DIM, **options):
    torch.manual_seed(seed)
    return PrimalAttention(dim, H, S, causal=causal, **options).double()


def tokens(length=N, seed=0):
    return randn(B, length, DIM, seed=seed).requires_grad_()


def turned(z, count):
    """Channels c and c + C/2 as the parts of a complex number, times e^(i position / 10000^...)."""
    half = z.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=z.dtype) / half)
    turns = torch.polar(torch.ones((), dtype=z.dtype), torch.arange(count) * frequencies[:, None])
    rows = torch.complex(z[..., :half], z[..., half:]) * turns.T
    return torch.cat((rows.real, rows.imag), -1)


def dense_sequence(layer, x):
    """Scores e, r of the heads [H, n, S], dual variables and times of one sequence of n tokens."""
    n = len(x)
    q, k = (F.linear(x, p.weight, p.bias) for p in (layer.q_proj, layer.k_proj))
    q, k = (z.view(n, H, -1).transpose(0, 1) for z in (q, k))
    if layer.rotary:
        q, k = turned(q, n), turned(k, n)
    maps = {
        "cosine": lambda z: F.normalize(z, dim=-1),
        "unit_elu": lambda z: F.normalize(F.elu(z) + 1, dim=-1),
    }
    phi_q, phi_k = (maps[layer.features.names[0]](z) for z in (q, k))
    h = F.linear(x, layer.h_proj.weight, layer.h_proj.bias).view(n, 2, H, S)
    h_e, h_r = h.permute(1, 2, 0, 3)
    kernel = phi_q @ phi_k.mT
    if layer.decay is not None:
        if layer.decay == "fixed":
            shares = torch.sigmoid(layer.raw_decay)[:, None].expand(H, n)
        else:
            shares = torch.sigmoid(F.linear(x, layer.decay_proj.weight, layer.decay_proj.bias)).T
        times = -shares.log().cumsum(-1)
        kernel = kernel * (-(times[:, :, None] - times[:, None, :]).abs()).exp()
    of_e, of_r = (kernel.tril(), kernel.mT.tril()) if layer.causal else (kernel, kernel.mT)
    e, r = of_e @ h_r, of_r @ h_e
    if layer.decay is None and not layer.score_norm:
        counts = torch.arange(1, n + 1)[:, None] if layer.causal else n
        e, r = e / counts, r / counts
    return e, r, h_e, kernel


def dense_outputs(layer, x, mask):
    """Outputs of a batch, each sequence alone and without its padding."""
    rows = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        sequence = x[b, real]
        if not real.any():
            rows.append(torch.zeros_like(x[b]))
            continue
        e, r, _, _ = dense_sequence(layer, sequence)
        kept = {"both": (e, r), "e": (e,), "r": (r,)}[layer.scores]
        scores = torch.cat(kept, -1).transpose(0, 1)  # [n, H, 2 S]
        if layer.score_norm:
            size = (scores.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            scores = scores / size * layer.score_gain
        heads = F.linear(scores, layer.score_proj.weight, layer.score_proj.bias).flatten(1)
        if layer.gate:
            heads = heads * F.silu(F.linear(sequence, layer.gate_proj.weight, layer.gate_proj.bias))
        out = F.linear(heads, layer.out_proj.weight, layer.out_proj.bias)
        rows.append(torch.zeros_like(x[b]).masked_scatter(real[:, None], out))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options, mask, causal):
    layer, x = build(causal, **options), tokens()
    if layer.score_norm:
        torch.nn.init.uniform_(layer.score_gain, 0.5, 1.5)
    got, want = layer(x, token_mask=MASKS[mask]), dense_outputs(layer, x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_any_length_in_blocks_and_chunks(length, causal):
    layer, x = build(causal, **FULL), tokens(length)
    assert_same_with_gradients(layer, layer(x), dense_outputs(layer, x, None), [x])
    with chunk_elements(1):
        assert_same_with_gradients(layer, layer(x), dense_outputs(layer, x, None), [x])


def dense_objective(layer, x, mask, name):
    """J of each head, by the scores and the dual variables."""
    diagonal = layer.lambda_diag if name == "zero" else layer.lambda_diag.square()
    values = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        if not real.any():
            continue
        e, r, h_e, _ = dense_sequence(layer, x[b, real])
        energies = (e.square() + r.square()).sum(1) * diagonal
        j = (energies.sum(-1) / 2 - (h_e * e).sum((1, 2))).mean()
        values.append(j if name == "zero" else j / real.sum())
    values = torch.stack(values)
    return values.mean().square() if name == "released_batch" else values.square().mean()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["zero", "released", "released_batch"])
@pytest.mark.parametrize("decay", ["fixed", "learned"])
def test_objectives_are_those_of_the_scores(decay, name, mask, causal):
    layer, x = build(causal, **{**FULL, "decay": decay}), tokens()
    layer(x, token_mask=MASKS[mask])
    got = ksvd_loss(layer, objective=name)
    assert_same_with_gradients(layer, got, dense_objective(layer, x, MASKS[mask], name), [x])


def test_the_objective_vanishes_at_the_singular_vectors():
    """With h_e, h_r the singular vectors of the kernel and Lambda = 1 / sigma, J is 0."""
    layer = build(**TIME, scores="both")
    x = randn(1, N, DIM)
    kernel = dense_sequence(layer, x[0])[3]
    left, values, right = torch.linalg.svd(kernel)
    layer.lambda_diag = 1.0 / values[:, :S].detach()
    h = torch.stack((left[..., :S], right.mT[..., :S])).permute(2, 0, 1, 3).reshape(1, N, -1)
    layer.h_proj.register_forward_hook(lambda module, args, output: h)
    layer(x)
    assert ksvd_loss(layer, objective="zero") < 1e-20
    layer.lambda_diag = 2.0 / values[:, :S].detach()
    layer(x)
    assert ksvd_loss(layer, objective="zero") > 1e-2


def test_the_rank_of_the_kernel_exceeds_the_number_of_features():
    kernel = dense_sequence(build(**TIME), randn(N, DIM))[3]
    plain = dense_sequence(build(**{**TIME, "decay": None}), randn(N, DIM))[3]
    assert torch.linalg.matrix_rank(plain).max() <= HALF
    assert torch.linalg.matrix_rank(kernel).min() == N


def test_explained_energy_says_why_it_cannot_be():
    layer = build(**FULL)
    layer(tokens())
    with pytest.raises(ValueError, match=r"explained_energy .* a kernel with a decay"):
        ksvd_loss(layer, objective="explained_energy")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoding_goes_on_from_any_state(options):
    layer = build(True, **options).eval()
    x = tokens(40)
    mask = MASKS["holes"][:, :20].repeat(1, 2)
    want = layer(x, token_mask=mask)
    first, state = layer.prefill(x[:, :17], token_mask=mask[:, :17])
    second, state = layer.prefill(x[:, 17:33], state, token_mask=mask[:, 17:33])
    assert_close(torch.cat((first, second), 1), want[:, :33])
    y, state = layer.prefill(x[:, 33:], state, token_mask=mask[:, 33:])
    assert_close(y, want[:, 33:])
    state = layer.init_state(B)
    whole = layer(x)
    for t in range(40):
        y, state = layer.step(x[:, t], state)
        assert_close(y, whole[:, t])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_sequences_are_those_sequences(options, causal):
    layer, lengths = build(causal, **options), [7, 0, 23, 1, 70]
    x = randn(sum(lengths), DIM).requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    want = torch.cat([layer(each[None])[0] for each in x.split(lengths) if len(each)])
    assert_same_with_gradients(layer, layer(x, cu_seqlens=bounds), want, [x])


@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_token_lets_no_time_pass(causal):
    layer = build(causal, **FULL).eval()
    x, mask = tokens(), MASKS["holes"]
    got = layer(x, token_mask=mask)
    for b in range(B):
        assert_close(got[b, mask[b]], layer(x[b, mask[b]][None])[0])


def test_rotary_positions_make_the_kernel_depend_on_distances():
    layer = build(**{**FULL, "decay": None, "feature_map": "identity"}).eval()
    same = randn(1, 1, DIM).expand(1, N, DIM)
    given = layer.features_and_weights(same)
    kernel = (given.phi_q @ given.phi_k.mT)[0]
    for offset in (-3, 0, 5):
        diagonal = kernel.diagonal(offset, -2, -1)
        assert_close(diagonal, diagonal[..., :1].expand_as(diagonal))
    assert (kernel[..., 0, 3] - kernel[..., 0, 7]).abs().min() > 1e-3


@pytest.mark.parametrize("weights", ["static", "sampled"])
def test_a_norm_and_a_gate_go_with_all_weights(weights):
    layer, x = build(weights=weights, score_norm=True, gate=True), tokens()
    plain = build(weights=weights)
    plain.load_state_dict(layer.state_dict(), strict=False)
    scores = []
    for each in (layer, plain):
        each.score_proj.register_forward_pre_hook(lambda module, args: scores.append(args[0]))
    got = layer(x)
    plain(x)
    assert_close(scores[0], scores[1] / (scores[1].square().mean(-1, keepdim=True) + 1e-6).sqrt())
    heads = layer.score_proj(scores[0]).flatten(2) * F.silu(layer.gate_proj(x))
    assert_close(got, layer.out_proj(heads))


def test_time_starts_as_documented():
    fixed = build(**{**TIME, "decay": "fixed"})
    assert_close(fixed.raw_decay.detach(), torch.linspace(2, 6, H).double())
    with torch.device("meta"):
        empty = PrimalAttention(DIM, H, S, **TIME)
    for layer in (build(**TIME), empty.to_empty(device="cpu")):
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert_close(layer.decay_proj.bias.detach(), torch.full_like(layer.decay_proj.bias, 4.0))
        assert layer.decay_proj.weight.abs().max() <= 1 / math.sqrt(DIM)


@pytest.mark.parametrize("half_life", [1.0, 1e3, 1e6])
def test_half_lives_survive_autocast(half_life):
    """Logits of time are not rounded to bfloat16, in which 1e6 tokens would be 6 % off."""
    layer = build(True, **{**FULL, "score_norm": False}).float()
    torch.nn.init.zeros_(layer.decay_proj.weight)
    share = 0.5 ** (1.0 / half_life)
    bias = torch.logit(torch.tensor(share, dtype=torch.float64))
    torch.nn.init.constant_(layer.decay_proj.bias, bias.item())
    with torch.autocast("cpu", torch.bfloat16):
        steps = layer.time_steps(torch.zeros(1, 1, DIM), None)
    assert steps is not None
    assert_close(steps.double(), torch.full_like(steps, -math.log(share)).double(), 1e-5)


MISTAKES = [
    ({"decay": "learned"}, "decay='learned' needs weights='dual'"),
    ({"decay": "slow", "weights": "dual"}, "decay must be one of 'fixed', 'learned', got 'slow'"),
    (
        {"decay": "fixed", "weights": "dual", "feature_map": "exponential"},
        "decay='fixed' does not go with a normalised feature_map",
    ),
    ({"rotary": True, "weights": "static"}, "rotary=True needs an even head dimension, got 5"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        PrimalAttention(D, H, S, **options)


def test_a_context_has_no_time():
    with pytest.raises(ValueError, match="a context does not go with decay='learned'"):
        build(**TIME)(tokens(), tokens())


@pytest.mark.parametrize("option", ["score_norm", "gate", "rotary"])
def test_what_is_not_linear_is_not_folded(option):
    with pytest.raises(ValueError, match=f"fold needs a map that is linear .*{option}=True"):
        build(weights="static", **{option: True}).fold()


def test_the_name_of_the_registry():
    layer = build_attention("primal_time", DIM, H, num_directions=S)
    given = layer.weights, layer.decay, layer.score_norm, layer.gate, layer.rotary
    assert given == ("dual", "learned", True, True, False)
    assert layer.features.names == ("unit_elu", "unit_elu")
    with pytest.raises(TypeError, match="landmark_dropout"):
        build_attention("primal_time", DIM, H, landmark_dropout=0.1)
