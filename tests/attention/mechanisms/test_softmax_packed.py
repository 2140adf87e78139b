"""Softmax attention over real tokens that are moved together."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from primal_attention import build_attention
from primal_attention.attention.baselines import softmax
from primal_attention.attention.baselines.softmax import softmax_attention

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, N, T, H, C = 5, 31, 43, 2, 16


def one_by_one(q, k, v, q_bounds, k_bounds, longest_q, longest_k):
    """Each sequence on its own; what belongs to none is not a number."""
    out = torch.full_like(q, torch.nan)
    for b in range(len(q_bounds) - 1):
        mine = slice(q_bounds[b], q_bounds[b + 1])
        keys = slice(k_bounds[b], k_bounds[b + 1])
        assert mine.stop - mine.start <= longest_q and keys.stop - keys.start <= longest_k
        if keys.stop == keys.start:
            out[mine] = 0.0
        else:
            rows = (z.transpose(0, 1) for z in (q[mine], k[keys], v[keys]))
            out[mine] = scaled_dot_product_attention(*rows).transpose(0, 1)
    return out


@pytest.fixture
def without_flash(monkeypatch):
    """Take the packed path on a CPU."""
    monkeypatch.setattr(softmax, "takes_packed", lambda q: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)


def masks(kind, length, device="cpu"):
    """Masks of five sequences; the last one may have no token."""
    if kind == "none":
        return None
    if kind == "padded":
        lengths = torch.tensor([length, 1, length // 2, 7, 3], device=device)
        return torch.arange(length, device=device) < lengths[:, None]
    mask = torch.rand(B, length, generator=torch.Generator().manual_seed(length)) < 0.4
    mask[:, length // 3] = True
    mask[-1] = kind != "holes, one empty"
    return mask.to(device)


def results(function, tensors, d_out):
    """The output and the gradients of queries, keys and values."""
    tensors = [z.detach().requires_grad_() for z in tensors]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]


def inputs(mask, source_mask, dtype, device="cpu"):
    """Queries, keys and values, which are not numbers at padding, and a gradient, zero there."""
    torch.manual_seed(0)
    q, d_out = torch.randn(2, B, N, H, C, dtype=dtype, device=device)
    k, v = torch.randn(2, B, source_mask.shape[1], H, C, dtype=dtype, device=device)
    if mask is not None:
        d_out = d_out.masked_fill(~mask[..., None, None], 0.0)
    return [q, k, v], d_out


KINDS = ["none", "padded", "holes", "holes, one empty"]


@pytest.mark.parametrize("source_kind", KINDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_attention_with_a_mask(without_flash, monkeypatch, kind, source_kind):
    mask, source_mask = masks(kind, N), masks(source_kind, T)
    tensors, d_out = inputs(mask, source_mask, torch.float64)

    def attention(q, k, v):
        return softmax_attention(q, k, v, source_mask, mask=mask)

    poisoned = [
        z if real is None else z.masked_fill(~real[..., None, None], torch.nan)
        for z, real in zip(tensors, [mask, source_mask, source_mask], strict=True)
    ]
    found = results(attention, poisoned, d_out)
    monkeypatch.setattr(softmax, "takes_packed", lambda q: False)
    exact = results(attention, tensors, d_out)
    if mask is not None:
        exact[0] = exact[0].masked_fill(~mask[..., None, None], 0.0)
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    "name", ["softmax", "softmax_bn", "softmax_sh", "softmax_bn_sh", "nystrom"]
)
def test_layers_are_the_same(without_flash, monkeypatch, name):
    """With holes, padding that is not a number, and a sequence without tokens."""
    torch.manual_seed(0)
    options = {"num_landmarks": 11} if name == "nystrom" else {}
    layer = build_attention(name, H * C, H, **options).double()
    mask = masks("holes, one empty", N)
    x = torch.randn(B, N, H * C, dtype=torch.float64).masked_fill(~mask[..., None], torch.nan)
    dy = torch.randn(B, N, H * C, dtype=torch.float64)

    def numbers():
        layer.zero_grad()
        leaf = x.detach().requires_grad_()
        y = layer(leaf, token_mask=mask)
        y.backward(dy)
        return [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    found = numbers()
    monkeypatch.setattr(softmax, "takes_packed", lambda q: False)
    torch.testing.assert_close(found, numbers(), atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_flash_attention_does_not_take(dtype):
    assert not softmax.takes_packed(torch.zeros(1, 1, 1, 8, dtype=dtype))


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_compiled_code_knows_whether_flash_attention_runs(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        return x + 1 if softmax._flash_runs() else x

    assert step(torch.zeros(3)).sum() == (3 if capability >= (8, 0) else 0)


gpu = pytest.param("cuda", marks=ON_GPU)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch 2.11's own compiler
@pytest.mark.parametrize("device", [gpu])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("source_kind", KINDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_flash_attention_against_float64(device, kind, source_kind, compiled):
    """Its errors are at most twice those of a mask in the same dtype."""
    mask, source_mask = masks(kind, N, device), masks(source_kind, T, device)
    tensors, d_out = inputs(mask, source_mask, torch.float64, device)

    def attention(q, k, v):
        return softmax_attention(q, k, v, source_mask, mask=mask)

    exact = results(attention, tensors, d_out)
    halves = [z.bfloat16() for z in tensors]
    assert softmax.takes_packed(halves[0])
    function = torch.compile(attention, fullgraph=True) if compiled else attention
    found = results(function, halves, d_out.bfloat16())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "takes_packed", lambda q: False)
        plain = results(attention, halves, d_out.bfloat16())
    real = slice(None) if mask is None else mask
    for one, other, right in zip(found, plain, exact, strict=True):
        assert one.isfinite().all()
        if one is found[0]:
            one, other, right = one[real], other[real], right[real]
        error, allowed = ((z.double() - right).norm() for z in (one, other))
        assert error <= 2 * allowed + 1e-6 * right.norm()


@pytest.mark.parametrize("device", [gpu])
def test_nothing_waits_for_the_device(device):
    """One recording for batches with other masks."""
    mask = masks("holes", N, device)
    tensors, _ = inputs(mask, mask, torch.bfloat16, device)
    tensors = [z[:, :N].contiguous() for z in tensors]
    softmax_attention(*tensors, mask, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softmax_attention(*tensors, mask, mask=mask)
    mask.copy_(masks("padded", N, device))
    graph.replay()
    torch.testing.assert_close(out, softmax_attention(*tensors, mask, mask=mask))
