"""The ops by their formulas, token by token, and how an op is held against a formula."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

B, H, N, C, S = 2, 3, 23, 5, 7

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": lambda z: z / torch.linalg.vector_norm(z, dim=-1, keepdim=True),
    "elu": lambda z: F.elu(z) + 1,
    "unit_elu": lambda z: F.normalize(F.elu(z) + 1, dim=-1),
    "relu": F.relu,
    "identity": lambda z: z,
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def token_masks(batch: int, length: int) -> dict[str, Tensor | None]:
    """No mask, padding at the end, holes (first and last token too), and an empty sequence."""
    padded = torch.arange(length).expand(batch, length) < length - 4
    generator = torch.Generator().manual_seed(5)
    holes = torch.rand(batch, length, generator=generator) < 0.6
    holes[:, 0], holes[0, -1] = False, False
    empty = holes.clone()
    empty[-1] = False
    return {"none": None, "padded": padded.clone(), "holes": holes, "empty": empty}


MASKS = token_masks(B, N)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of all inputs from fixed cotangents of all outputs."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = list(function(*leaves))
    pairs = [
        (output, randn(*output.shape, seed=90 + i, dtype=output.dtype).to(output.device))
        for i, output in enumerate(outputs)
        if output.requires_grad
    ]
    given = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(
        [output for output, _ in pairs],
        given,
        [cotangent for _, cotangent in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return [output.detach() for output in outputs], list(grads)


def assert_same(
    function: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    tolerance: float = 1e-10,
) -> None:
    """Outputs and all gradients of both functions agree."""
    actual, expected = gradients(function, inputs), gradients(reference, inputs)
    for got, want in zip(actual, expected, strict=True):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, tolerance)


def assert_identical(
    actual: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]
) -> None:
    """What `gradients` returned twice is the same in every bit."""
    pairs = zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True)
    for number, (got, want) in enumerate(pairs):
        assert torch.equal(got, want), f"tensor {number}: {int((got != want).sum())} entries differ"


def real(mask: Tensor | None, b: int, i: int) -> bool:
    return mask is None or bool(mask[b, i])


def dense_primal(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    *,
    token_mask: Tensor | None = None,
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> tuple[Tensor, Tensor, Tensor]:
    """out_i = C_e^T e_i + C_r^T r_i + b with e_i = W_e^T phi_q(x_i), r_i = W_r^T phi_k(x_i)."""
    batch, length, heads, _ = q.shape
    P, width = w_e.shape[-2], (c_e if c_e is not None else c_r).shape[-1]
    out = [[[torch.zeros(width).to(q)] * heads for _ in range(length)] for _ in range(batch)]
    gram_q = [[torch.zeros(P, P).to(q) for _ in range(heads)] for _ in range(batch)]
    gram_k = [[torch.zeros(P, P).to(q) for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        for h in range(heads):
            weight_e, weight_r = (w[h] if w.ndim == 3 else w[b, h] for w in (w_e, w_r))
            for i in (i for i in range(length) if real(token_mask, b, i)):
                phi_q, phi_k = MAPS[map_q](q[b, i, h]), MAPS[map_k](k[b, i, h])
                total = torch.zeros(width).to(q) if bias is None else bias
                if c_e is not None:
                    total = total + (phi_q @ weight_e) @ c_e
                if c_r is not None:
                    total = total + (phi_k @ weight_r) @ c_r
                out[b][i][h] = total
                gram_q[b][h] = gram_q[b][h] + torch.outer(phi_q, phi_q)
                gram_k[b][h] = gram_k[b][h] + torch.outer(phi_k, phi_k)
    return tuple(map(stacked, (out, gram_q, gram_k)))


def dense_moment(
    z: Tensor, values: Tensor, *, token_mask: Tensor | None = None, feature_map: str = "cosine"
) -> tuple[Tensor]:
    """The sum over the real tokens of phi(z_i) h_i^T."""
    batch, length, heads, P = z.shape
    total = [
        [
            sum(
                (
                    torch.outer(MAPS[feature_map](z[b, i, h]), values[b, i, h])
                    for i in range(length)
                    if real(token_mask, b, i)
                ),
                torch.zeros(P, values.shape[-1]).to(z),
            )
            for h in range(heads)
        ]
        for b in range(batch)
    ]
    return (stacked(total),)


def dense_scan(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    value_map: Tensor | None,
    state: Tensor | None,
    *,
    token_mask: Tensor | None = None,
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + phi_k(k_t) v_t^T and y_t = S_t^T phi_q(q_t), one token after another."""
    batch, length, heads, P = q.shape
    if value_map is not None:
        values = values @ value_map
    zero = torch.zeros(P, values.shape[-1]).to(q)
    out = [[[zero[0]] * heads for _ in range(length)] for _ in range(batch)]
    last = [[zero] * heads for _ in range(batch)]
    for b in range(batch):
        for h in range(heads):
            memory = zero if state is None else state[b, h]
            for t in (t for t in range(length) if real(token_mask, b, t)):
                memory = memory + torch.outer(MAPS[map_k](k[b, t, h]), values[b, t, h])
                out[b][t][h] = MAPS[map_q](q[b, t, h]) @ memory
            last[b][h] = memory
    return stacked(out), stacked(last)


def dense_timed(
    z: Tensor,  # [2, H, B, N, C]
    values: Tensor,  # [sides, H, B, N, V]
    steps: Tensor,  # [H, B, N]
    maps: tuple[str, str],
    token_mask: Tensor | None,
    *,
    future: bool,
) -> tuple[Tensor, ...]:
    """Sums of exp(-|a_i - a_j|) <phi_q(x_i), phi_k(x_j)>, all of them, and the causal state."""
    queries, keys = (MAPS[name](side) for name, side in zip(maps, z, strict=True))
    keep = torch.ones_like(steps[0]) if token_mask is None else token_mask
    queries, keys, values = (each * keep[:, :, None].to(z) for each in (queries, keys, values))
    times = steps.cumsum(-1)
    decay = (-(times[..., :, None] - times[..., None, :]).abs()).exp().to(z)
    kernel = decay * torch.einsum("hbip, hbjp -> hbij", queries, keys)
    read = (kernel, kernel.mT)[: len(values)]
    stored = (values[-1], values[0])[: len(values)]
    out = [(each if future else each.tril()) @ v for each, v in zip(read, stored, strict=True)]
    if future:
        return (torch.stack(out),)
    left = (times - times[..., -1:]).exp()[..., None].to(z)
    pairs = zip((queries, keys)[-len(values) :], values, strict=True)
    after = [torch.einsum("hbnp, hbnv -> hbpv", phi * left, v) for phi, v in pairs]
    return torch.stack(out), torch.stack(after)


def stacked(nested: list) -> Tensor:
    return torch.stack([stacked(one) if isinstance(one, list) else one for one in nested])
