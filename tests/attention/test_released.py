"""The released layers and their loss, written out from their formulas, against ours.

The five domains have one layer each, with its own parameter names. Time series, long sequences and
images sample tokens; reinforcement learning and language are causal with data-independent weights.
"""

import math

import pytest
import torch
from torch import nn

from primal_attention import PrimalAttention, ksvd_loss

B, H, N, C, S = 2, 3, 23, 5, 7
D, MULTI = H * C, 2
M = S * MULTI

NAMES = {
    "time series": {
        "q": "query_projection",
        "k": "key_projection",
        "out": "out_projection",
        "w_e": "We",
        "w_r": "Wr",
        "lambda": "inner_attention.Lambda",
        "scores": "inner_attention.concate_weight",
    },
    "long sequences": {
        "q": "W_q",
        "k": "W_k",
        "out": "ff",
        "w_e": "We",
        "w_r": "Wr",
        "lambda": "attn.Lambda",
        "scores": "attn.concate_weight",
    },
    "reinforcement learning": {
        "q": "query_projection",
        "k": "key_projection",
        "out": "out_projection",
        "w_e": "We",
        "w_r": "Wr",
        "lambda": "Lambda",
        "scores": "concate_weight",
    },
    "images": {
        "qk": "qk",
        "out": "proj",
        "w_e": "we",
        "w_r": "wr",
        "lambda": "Lambda",
        "scores": "concate_weight",
    },
    "language": {
        "q": "q_proj",
        "k": "k_proj",
        "out": "out_proj",
        "w_e": "We",
        "w_r": "Wr",
        "lambda": "Lambda",
        "scores": "concate_weight",
    },
}
SAMPLED = ("time series", "long sequences", "images")
INSIDE = ("long sequences", "images")  # the batch mean is inside the square


def released_parameters(domain, *, rows, qk_bias=True):
    """A state dict with the shapes and names of one released layer, Lambda of either sign."""
    torch.manual_seed(3)
    names, state = NAMES[domain], {}

    def linear(name, fan_in, fan_out, bias=True):
        module = nn.Linear(fan_in, fan_out, bias=bias)
        for kind, parameter in module.named_parameters():
            state[f"{name}.{kind}"] = parameter.detach()

    for part in {"q", "k", "out"} & names.keys():
        linear(names[part], D, D)
    if "qk" in names:
        linear(names["qk"], D, 2 * D, qk_bias)
    linear(names["scores"], 2 * S, C)
    for part in ("w_e", "w_r"):
        state[names[part]] = nn.init.orthogonal_(torch.empty(H, rows, S))
    state[names["lambda"]] = torch.rand(H, S) * 2 - 1
    return state


class Released:
    """The formulas of the released layers: outputs, and J of each sequence."""

    def __init__(self, domain, state, *, sampled, causal):
        self.names, self.state = NAMES[domain], state
        self.sampled, self.causal = sampled, causal

    def linear(self, part, x):
        name = self.names[part]
        return nn.functional.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def __call__(self, x):
        if "qk" in self.names:
            q, k = self.linear("qk", x).split(D, dim=-1)
        else:
            q, k = self.linear("q", x), self.linear("k", x)
        q, k = (self.split(z) for z in (q, k))
        if self.causal:
            steps = torch.arange(1, x.shape[1] + 1).view(1, 1, -1, 1)
            q, k = q.cumsum(2) / steps, k.cumsum(2) / steps
        phi_q, phi_k = (nn.functional.normalize(z, p=2, dim=-1) for z in (q, k))
        w_e, w_r = self.state[self.names["w_e"]], self.state[self.names["w_r"]]
        given_e, given_r = w_e.expand(len(x), *w_e.shape), w_r.expand(len(x), *w_r.shape)
        if self.sampled:
            n = w_e.shape[1]
            index = torch.linspace(0, x.shape[1] - 1, n).long()
            x_sampled = self.split(x[:, index])  # [B, H, n, C]
            given_e = torch.einsum("bhnc,hns->bhcs", x_sampled, w_e)
            given_r = torch.einsum("bhnc,hns->bhcs", x_sampled, w_r)
        e, r = phi_q @ given_e, phi_k @ given_r  # [B, H, N, S]
        heads = self.linear("scores", torch.cat([e, r], dim=-1))
        out = self.linear("out", heads.transpose(1, 2).reshape(x.shape))
        return out, self.objective(e, r, w_e, w_r)

    def objective(self, e, r, w_e, w_r):
        """(1 / 2HN) sum (|Lambda e|^2 + |Lambda r|^2) - (1/H) sum Tr(W_e^T W_r), [B]."""
        scale = torch.diag_embed(self.state[self.names["lambda"]])  # [H, S, S]
        n = e.shape[2]
        e_term = (e @ scale).norm(dim=-1).square().sum((1, 2)) / (2 * H * n)
        r_term = (r @ scale).norm(dim=-1).square().sum((1, 2)) / (2 * H * n)
        trace = sum(torch.trace(w_e[h].T @ w_r[h]) for h in range(H)) / H
        return e_term + r_term - trace

    @staticmethod
    def split(z):
        return z.view(*z.shape[:2], H, C).transpose(1, 2)


def assert_equal(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def released(domain, **options):
    sampled = domain in SAMPLED
    state = released_parameters(domain, rows=options.pop("rows", M if sampled else C), **options)
    return state, Released(domain, state, sampled=sampled, causal=not sampled)


@pytest.mark.parametrize("domain", NAMES)
def test_outputs_and_objective_of_an_imported_layer_are_the_released_ones(domain):
    state, layer = released(domain)
    ours = PrimalAttention.from_released(state)
    torch.manual_seed(0)
    x = torch.randn(B, N, D)
    want, j = layer(x)
    assert_equal(ours(x), want)
    assert_equal(ksvd_loss(ours, objective="released"), j.square().mean())
    assert_equal(ksvd_loss(ours, objective="released_batch"), j.mean().square())
    assert abs(j.square().mean() - j.mean().square()) > 1e-6, "the two could not be told apart"
    assert ours.causal == (domain not in SAMPLED)
    assert ours.weights == ("sampled" if domain in SAMPLED else "static")
    assert_equal(ours.eval()(x), want)


@pytest.mark.parametrize("domain", NAMES)
def test_gradients_of_the_loss_reach_the_same_parameters(domain):
    """Task and objective, as each domain adds them, by every parameter but Lambda."""
    state, layer = released(domain)
    ours = PrimalAttention.from_released(state)
    torch.manual_seed(0)
    x = torch.randn(B, N, D)
    objective = "released_batch" if domain in INSIDE else "released"
    loss = ours(x).square().mean() + 0.1 * ksvd_loss(ours, objective=objective)
    loss.backward()
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    layer.state = theirs
    out, j = layer(x)
    squared = j.mean().square() if domain in INSIDE else j.square().mean()
    (out.square().mean() + 0.1 * squared).backward()
    names = NAMES[domain]
    if "qk" in names:
        q_grad, k_grad = theirs["qk.weight"].grad.split(D)
    else:
        q_grad, k_grad = (theirs[f"{names[part]}.weight"].grad for part in ("q", "k"))
    assert_equal(ours.q_proj.weight.grad, q_grad)
    assert_equal(ours.k_proj.weight.grad, k_grad)
    for name in ("w_e", "w_r"):
        assert_equal(getattr(ours, name).grad, theirs[names[name]].grad)
    assert_equal(ours.out_proj.weight.grad, theirs[f"{names['out']}.weight"].grad)
    assert_equal(ours.score_proj.weight.grad, theirs[f"{names['scores']}.weight"].grad)
    # d/d(raw) = softplus'(raw) d/d(lambda), and the sign of Lambda is dropped.
    chain = torch.sigmoid(ours.raw_lambda.detach()) * state[names["lambda"]].sign()
    assert_equal(ours.raw_lambda.grad, theirs[names["lambda"]].grad * chain)


@pytest.mark.parametrize("rows", [N, S, 20])
def test_layers_that_sample_another_number_of_tokens(rows):
    """Images take all tokens where there are fewer than s times rank_multi."""
    state, layer = released("images", rows=rows)
    ours = PrimalAttention.from_released(state)
    assert ours.num_landmarks == rows
    assert ours.w_e.shape == (H, rows, S)
    x = torch.randn(B, N, D)
    assert_equal(ours(x), layer(x)[0])


@pytest.mark.parametrize("rows", [M, C])
def test_a_layer_built_by_hand_with_the_same_weights(rows):
    """The data-dependent and the data-independent form, the latter not in the released code."""
    state = released_parameters("time series", rows=rows)
    sampled = rows == M
    layer = Released("time series", state, sampled=sampled, causal=False)
    ours = PrimalAttention(
        D, H, S, weights="sampled" if sampled else "static", samples_per_direction=MULTI
    )
    copy = {"query_projection": "q_proj", "key_projection": "k_proj", "out_projection": "out_proj"}
    copy["inner_attention.concate_weight"] = "score_proj"
    ours.load_state_dict(
        {
            f"{ours_name}.{kind}": state[f"{name}.{kind}"]
            for name, ours_name in copy.items()
            for kind in ("weight", "bias")
        }
        | {"w_e": state["We"], "w_r": state["Wr"], "raw_lambda": ours.raw_lambda}
    )
    ours.lambda_diag = state["inner_attention.Lambda"].abs()
    x = torch.randn(B, N, D)
    want, j = layer(x)
    assert_equal(ours(x), want)
    assert_equal(ksvd_loss(ours), j.square().mean())


def test_a_negative_lambda_becomes_its_absolute_value():
    state, _ = released("time series")
    given = state["inner_attention.Lambda"]
    assert (given < 0).any()
    assert_equal(PrimalAttention.from_released(state).lambda_diag, given.abs())


def test_a_packed_projection_without_bias():
    state, layer = released("images", qk_bias=False)
    assert "qk.bias" not in state
    ours = PrimalAttention.from_released(state)
    assert not ours.q_proj.bias.any()
    assert not ours.k_proj.bias.any()
    x = torch.randn(B, N, D)
    assert_equal(ours(x), layer(x)[0])


@pytest.mark.parametrize("domain", NAMES)
def test_the_import_copies_and_does_not_share(domain):
    state, _ = released(domain)
    before = {name: tensor.clone() for name, tensor in state.items()}
    ours = PrimalAttention.from_released(state, dropout=0.25)
    assert ours.dropout == 0.25
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7.0)
    assert state.keys() == before.keys()
    for name in state:
        assert torch.equal(state[name], before[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_import_keeps_the_dtype(dtype):
    state, _ = released("language")
    ours = PrimalAttention.from_released({name: x.to(dtype) for name, x in state.items()})
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}


@pytest.mark.parametrize("domain", NAMES)
def test_missing_parameters_are_named(domain):
    ours = {"q": "q_proj", "k": "k_proj", "out": "out_proj", "scores": "score_proj"}
    ours |= {"w_e": "w_e", "w_r": "w_r", "lambda": "lambda_diag", "qk": "q_proj"}
    for part, name in NAMES[domain].items():
        state, _ = released(domain)
        state = {key: value for key, value in state.items() if not key.startswith(name)}
        with pytest.raises(ValueError, match=rf"state_dict .*found no .*{ours[part]}"):
            PrimalAttention.from_released(state)
    with pytest.raises(ValueError, match=r"found no .*k_proj.*w_e.*among its keys \['x'\]"):
        PrimalAttention.from_released({"x": torch.zeros(1)})


def test_the_released_number_of_parameters():
    """936,112 for d 512, 8 heads, s 30 and 300 sampled tokens; Lambda has another form here."""
    ours = PrimalAttention(512, 8, 30, weights="sampled")
    assert sum(math.prod(p.shape) for p in ours.parameters()) == 936_112
