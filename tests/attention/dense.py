"""Primal-Attention from the paper, one sequence, one head and one token at a time.

Padding is not masked here: padded tokens are taken out before anything is computed.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from primal_attention import PrimalAttention

B, H, N, C, S = 2, 3, 23, 5, 7
D = H * C

FIXED = {
    "cosine": lambda z: z / torch.linalg.vector_norm(z, dim=-1, keepdim=True),
    "elu": lambda z: F.elu(z) + 1,
    "relu": F.relu,
    "identity": lambda z: z,
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def build(*, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> PrimalAttention:
    """A small layer; 21 landmarks for 23 tokens, unless the options say otherwise."""
    torch.manual_seed(seed)
    if options.get("weights", "sampled") == "sampled":
        options.setdefault("samples_per_direction", 3)
    return PrimalAttention(D, H, S, **options).to(dtype)


def masks(batch: int = B, length: int = N) -> dict[str, Tensor | None]:
    """No mask, padding at the end, holes at both ends and inside, an empty sequence."""
    padded = (torch.arange(length).expand(batch, length) < length - 4).clone()
    padded[0] = True
    generator = torch.Generator().manual_seed(5)
    holes = torch.rand(batch, length, generator=generator) < 0.6
    holes[:, 0], holes[0, -1], holes[:, 1] = False, False, True
    empty = holes.clone()
    empty[-1] = False
    return {"none": None, "padded": padded, "holes": holes, "empty": empty}


MASKS = masks()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_with_gradients(
    layer: PrimalAttention, got: Tensor, want: Tensor, inputs: list[Tensor], tolerance=1e-10
) -> None:
    """Two outputs of one layer and their gradients by its inputs and parameters agree."""
    assert_close(got, want, tolerance)
    named = {f"input {i}": x for i, x in enumerate(inputs)} | dict(layer.named_parameters())
    cotangent = randn(*want.shape, seed=77, dtype=want.dtype)
    options = {"allow_unused": True, "materialize_grads": True}
    grads = [
        torch.autograd.grad(output, list(named.values()), cotangent, **options)
        for output in (got, want)
    ]
    for name, one, other in zip(named, *grads, strict=True):
        torch.testing.assert_close(
            one,
            other,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@dataclass
class Sequence:
    """Outputs of one sequence and all that enters the objective, head by head."""

    out: Tensor | None = None  # [n, D]
    e: list[Tensor] = field(default_factory=list)  # [n, S] over the queries' tokens
    r: list[Tensor] = field(default_factory=list)  # [n, S] over the keys' tokens
    w_e: list[Tensor] = field(default_factory=list)  # [P, S], given the sequence
    w_r: list[Tensor] = field(default_factory=list)


def features(layer: PrimalAttention, z: Tensor, side: int) -> Tensor:
    name = layer.features.names[side]
    modules = list(layer.features.maps)
    if not modules:
        return FIXED[name](z)
    feature_map = modules[side if len(modules) == 2 else 0]
    z = z / C**0.25
    exponent = z @ feature_map.projection.to(z).T - z.square().sum(-1, keepdim=True) / 2
    return (exponent.exp() + feature_map.eps) / math.sqrt(feature_map.feature_dim)


def running_means(z: Tensor) -> Tensor:
    return torch.stack([z[: t + 1].sum(0) / (t + 1) for t in range(len(z))])


def normalised(layer: PrimalAttention, phi_q: Tensor, phi_k: Tensor, keys: Tensor):
    """Both sides over the square root of the row sums of the kernel matrix, where the map asks."""
    if not layer.features.normalised:
        return phi_q, phi_k
    kernel_matrix = phi_q @ keys.T
    row_sums = (kernel_matrix.tril() if layer.causal else kernel_matrix).sum(-1, keepdim=True)
    return phi_q / row_sums.sqrt(), phi_k / row_sums.sqrt()


def landmarks(x: Tensor, count: int) -> Tensor:
    n = len(x)
    if n == 0:
        return x.new_zeros(count, x.shape[-1])
    return torch.stack([x[i * (n - 1) // max(count - 1, 1)] for i in range(count)])


def one_sequence(layer: PrimalAttention, x: Tensor, context: Tensor | None = None) -> Sequence:
    """The layer on the real tokens x [n, D] of one sequence (and of its context)."""
    source = x if context is None else context
    result, heads = Sequence(), []
    for h in range(layer.num_heads):
        channels = slice(h * C, (h + 1) * C)
        q, k, source_q, source_k = (
            projection(tokens)[:, channels]
            for tokens in (x, source)
            for projection in (layer.q_proj, layer.k_proj)
        )
        if layer.causal and layer.weights == "static":
            q, k = running_means(q), running_means(k)
            source_q, source_k = q, k
        phi_q, phi_k = features(layer, q, 0), features(layer, k, 1)
        keys = features(layer, source_k, 1)
        source_queries = features(layer, source_q, 0)
        phi_q, phi_k = normalised(layer, phi_q, phi_k, keys)
        _, keys = normalised(layer, source_queries, keys, keys)
        heads.append(_one_head(layer, h, x, source, phi_q, phi_k, keys, result))
    result.out = layer.out_proj(torch.cat(heads, dim=-1))
    return result


def _one_head(layer, h, x, source, phi_q, phi_k, keys, result: Sequence) -> Tensor:
    channels = slice(h * C, (h + 1) * C)
    if layer.weights == "static":
        w_e, w_r = layer.w_e[h], layer.w_r[h]
    elif layer.weights == "sampled":
        x_sampled = landmarks(source[:, channels], layer.num_landmarks)
        w_e, w_r = x_sampled.T @ layer.w_e[h], x_sampled.T @ layer.w_r[h]
    else:
        rows = slice(h * S, (h + 1) * S)
        h_e = layer.h_proj(x)[:, : H * S][:, rows]
        h_r = layer.h_proj(source)[:, H * S :][:, rows]
        w_e, w_r = keys.T @ h_r / max(len(source), 1), phi_q.T @ h_e / max(len(x), 1)
    e, r = phi_q @ w_e, phi_k @ w_r
    result.e.append(e)
    result.r.append(keys @ w_r)
    result.w_e.append(w_e)
    result.w_r.append(w_r)
    if layer.causal and layer.weights == "dual":
        e = [phi_q[t] @ (keys[: t + 1].T @ h_r[: t + 1]) / (t + 1) for t in range(len(x))]
        r = [phi_k[t] @ (phi_q[: t + 1].T @ h_e[: t + 1]) / (t + 1) for t in range(len(x))]
        e, r = torch.stack(e), torch.stack(r)
    scores = {"both": torch.cat([e, r], dim=-1), "e": e, "r": r}[layer.scores]
    return layer.score_proj(scores)


def dense_run(
    layer: PrimalAttention,
    x: Tensor,
    mask: Tensor | None = None,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> tuple[Tensor, list[Sequence]]:
    """The outputs [B, N, D], zero at padding, and what each sequence with real tokens gave."""
    rows, sequences = [], []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        given = None
        if context is not None:
            given = context[b] if context_mask is None else context[b][context_mask[b]]
        row = torch.zeros_like(x[b])
        if real.any():
            sequence = one_sequence(layer, x[b][real], given)
            sequences.append(sequence)
            row = row.index_put((real.nonzero()[:, 0],), sequence.out.to(row))
        rows.append(row)
    return torch.stack(rows), sequences


def dense(layer: PrimalAttention, x: Tensor, *args, **kwargs) -> Tensor:
    """The outputs alone."""
    return dense_run(layer, x, *args, **kwargs)[0]


def released_j(layer: PrimalAttention, sequence: Sequence) -> Tensor:
    """J of the released code: Lambda squared, the mean over tokens, the mean over heads."""
    total = 0.0
    for h in range(layer.num_heads):
        scale = layer.lambda_diag[h]
        e_term = sum((scale * e).square().sum() for e in sequence.e[h]) / len(sequence.e[h])
        r_term = sum((scale * r).square().sum() for r in sequence.r[h]) / len(sequence.r[h])
        if layer.weights == "dual":
            trace = torch.trace(sequence.w_e[h].T @ sequence.w_r[h])
        else:
            trace = torch.trace(layer.w_e[h].T @ layer.w_r[h])
        total = total + e_term / 2 + r_term / 2 - trace
    return total / layer.num_heads
