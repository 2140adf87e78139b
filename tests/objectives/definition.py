"""The objectives as they are defined: explicit scores and the dense kernel matrix.

One sequence at a time and only its real tokens, so that there is no mask here. Nothing is taken
from the package but the parameters of a layer.

Letters: B batch, n queries, t keys, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, linear, softplus

OBJECTIVES = ["zero", "released", "released_batch", "explained_energy"]


class Run(NamedTuple):
    """One layer on one sequence."""

    e_scores: Tensor  # [H, n, S]
    r_scores: Tensor  # [H, t, S]
    kernel_matrix: Tensor  # [H, n, t]
    trace: Tensor  # [H]
    lambda_diag: Tensor  # [H, S]
    averaged: bool  # J averages over tokens


def runs(layer, x, context=None, *, token_mask=None, context_mask=None):
    """A layer on each sequence [B, any, D] with a real token on both sides."""
    taken = []
    for b in range(len(x)):
        queries = x[b] if token_mask is None else x[b][token_mask[b]]
        keys = None
        if context is not None:
            keys = context[b] if context_mask is None else context[b][context_mask[b]]
        if len(queries) > 0 and (keys is None or len(keys) > 0):
            taken.append(run(layer, queries, keys))
    return taken


def run(layer, x, context=None):
    """A layer on one sequence of real tokens [n, D]."""
    source = x if context is None else context
    phi_q, _ = features(layer, x)  # [H, n, P]
    _, phi_k = features(layer, source)  # [H, t, P]
    w_e_given_x, w_r_given_x, a = weights(layer, x, source, phi_q, phi_k)
    pair = (w_e_given_x, w_r_given_x) if layer.weights == "dual" else (layer.w_e, layer.w_r)
    return Run(
        phi_q @ w_e_given_x,
        phi_k @ w_r_given_x,
        phi_q @ a @ phi_k.mT,
        torch.stack([torch.trace(e.T @ r) for e, r in zip(*pair, strict=True)]),
        softplus(layer.raw_lambda),
        averaged=layer.weights == "dual",
    )


def heads(z, num_heads):
    """[n, H C] -> [H, n, C]."""
    return torch.stack(z.chunk(num_heads, dim=-1))


def features(layer, x):
    """phi_q and phi_k of the same tokens, [H, n, P]."""
    q, k = (heads(proj(x), layer.num_heads) for proj in (layer.q_proj, layer.k_proj))
    if layer.weights == "static" and layer.causal:
        n = len(x)
        mean = torch.ones(n, n, dtype=x.dtype).tril() / torch.arange(1, n + 1)[:, None]
        q, k = mean @ q, mean @ k
    if layer.features.normalised:
        return normalised_features(layer, q, k)
    functions = {"cosine": cosine, "elu": lambda z: elu(z) + 1, "identity": lambda z: z}
    map_q, map_k = (functions[name] for name in layer.features.names)
    return map_q(q), map_k(k)


def cosine(z):
    return z / z.norm(dim=-1, keepdim=True)


def normalised_features(layer, q, k):
    """Positive random features, both sides divided by the root of D-hat of their token."""
    projection, eps = layer.features.maps[0].projection, layer.features.maps[0].eps

    def positive(z):
        z = z / z.shape[-1] ** 0.25
        exponent = linear(z, projection) - z.square().sum(-1, keepdim=True) / 2
        return (exponent.exp() + eps) / len(projection) ** 0.5

    g_q, g_k = positive(q), positive(k)
    d_hat = (g_q @ g_k.mT).sum(-1, keepdim=True)  # [H, n, 1]
    return g_q / d_hat.sqrt(), g_k / d_hat.sqrt()


def weights(layer, x, source, phi_q, phi_k):
    """W_{e|X} and W_{r|X} [H, P, S], and A = F_X^T F_X [H, P, P]."""
    identity = torch.eye(phi_q.shape[-1], dtype=x.dtype).expand(layer.num_heads, -1, -1)
    if layer.weights == "static":
        return layer.w_e, layer.w_r, identity
    if layer.weights == "sampled":
        M = layer.w_e.shape[1]
        index = [i * (len(source) - 1) // max(M - 1, 1) for i in range(M)]
        f_x = heads(source[index], layer.num_heads)  # [H, M, P]
        return f_x.mT @ layer.w_e, f_x.mT @ layer.w_r, f_x.mT @ f_x
    h_e = heads(layer.h_proj(x).chunk(2, dim=-1)[0], layer.num_heads)
    h_r = heads(layer.h_proj(source).chunk(2, dim=-1)[1], layer.num_heads)
    return phi_k.mT @ h_r / len(source), phi_q.mT @ h_e / len(x), identity


def j(run, lambda_diag, *, averaged):
    """J of eq. (11), mean over the heads."""
    matrix = torch.diag_embed(lambda_diag)  # [H, S, S]
    e_terms = torch.einsum("his,hst,hit->hi", run.e_scores, matrix, run.e_scores)
    r_terms = torch.einsum("his,hst,hit->hi", run.r_scores, matrix, run.r_scores)
    if averaged:
        e_terms, r_terms = e_terms / e_terms.shape[1], r_terms / r_terms.shape[1]
    return (e_terms.sum(1) / 2 + r_terms.sum(1) / 2 - run.trace).mean()


def released_j(run):
    return j(run, run.lambda_diag.square(), averaged=True)


def unexplained(run):
    """The part of |K|^2 that E Lambda R^T leaves, mean over the heads."""
    product = run.e_scores * run.lambda_diag[:, None] @ run.r_scores.mT
    left = (run.kernel_matrix - product).square().sum((1, 2))
    return (left / run.kernel_matrix.square().sum((1, 2))).mean()


def layer_objective(runs, objective):
    """One layer, over its sequences; those without a real token are not among them."""
    if objective == "zero":
        return torch.stack([j(r, r.lambda_diag, averaged=r.averaged) ** 2 for r in runs]).mean()
    if objective == "released":
        return torch.stack([released_j(r) ** 2 for r in runs]).mean()
    if objective == "released_batch":
        return torch.stack([released_j(r) for r in runs]).mean() ** 2
    return torch.stack([unexplained(r) for r in runs]).mean()


def objective_of_layers(runs_of_layers, objective):
    """All layers: their sum for the paper's J^2, their mean for the others."""
    values = torch.stack([layer_objective(runs, objective) for runs in runs_of_layers])
    return values.sum() if objective == "zero" else values.mean()
