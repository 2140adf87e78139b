"""The causal ops on a GPU, through their public functions: they are the fused ones."""

from functools import partial

import pytest
import torch

from primal_attention.ops.running_mean import running_mean, token_counts
from primal_attention.ops.scan import scan

from .formulas import gradients, randn
from .fused import TOLERANCES, assert_near
from .padding import holes

B, N, H, C, S = 2, 1531, 3, 64, 32
MASK = holes(B, N, "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def counts_on(device):
    return token_counts(torch.empty(B, N, device=device), MASK.to(device), None)


def means(z, before):
    mask = MASK.to(z.device)
    return running_mean(z, counts_on(z.device), token_mask=mask, before=before)


def scanned(*tensors):
    return scan(*tensors, token_mask=MASK.to(tensors[0].device), map_k="elu")


TOKENS, SUMS = (B, N, H, C), (B, H, C)
CASES = {  # with the shapes of tensors in the dtype, and of those that stay in float32
    "running_mean": (means, [TOKENS], [SUMS]),
    "scan": (scanned, [TOKENS, TOKENS, (B, N, H, S)], [(S, C), (B, H, C, C)]),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype):
    op, tokens, small = CASES[name]
    given = [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(tokens)]
    given += [randn(*shape, seed=9 + i).float() for i, shape in enumerate(small)]
    got = gradients(partial(_on_gpu, op), given)
    want = gradients(op, [x.double() for x in given])
    assert_near([*got[0], *got[1]], [*want[0], *want[1]], 2 * TOLERANCES[dtype], name)


def _on_gpu(op, *tensors):
    return [output.cpu() for output in op(*(x.cuda() for x in tensors))]


@pytest.mark.parametrize("name", CASES)
def test_in_one_compiled_graph(name):
    op, tokens, small = CASES[name]
    given = [randn(*shape).to("cuda", torch.bfloat16) for shape in tokens]
    given += [randn(*shape).to("cuda", torch.float32) for shape in small]
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    leaves = [x.requires_grad_() for x in given]
    for one, other in zip(compiled(*leaves), op(*leaves), strict=True):
        assert torch.equal(one, other)
    sum(output.float().sum() for output in compiled(*leaves)).backward()
    assert all(x.grad.isfinite().all() for x in leaves)
