"""Values against the vectors of the two theories."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from primal_attention import build_attention

from .patching.families import FAMILIES, real_tokens

STUDY = Path(__file__).parents[1] / "reproduction/primal_attention/value_alignment/agreement.py"
spec = importlib.util.spec_from_file_location("agreement", STUDY)
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)
agreement, kernel_pca_values = study.agreement, study.kernel_pca_values
right_singular_vectors, value_alignment = study.right_singular_vectors, study.value_alignment

D, H, N = 15, 3, 31


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def test_values_of_kernel_pca_are_projections_on_its_components():
    r"""$\sum_j A(q)_j v_{jd} \propto \langle u_d, \phi(q) / g(q) \rangle$, by the kernel alone."""
    q, k = (torch.randn(N, 5, dtype=torch.float64) for _ in range(2))
    kernel = (k @ k.T / 5**0.5).exp()
    g_k, to_queries = kernel.sum(1), (q @ k.T / 5**0.5).exp()
    g_q = to_queries.sum(1)
    features = kernel / g_k / g_k[:, None]  # Gram matrix of phi(k) / g(k)
    centre = torch.eye(N, dtype=torch.float64) - 1 / N
    eigenvalues, a = torch.linalg.eigh(centre @ features @ centre)
    at_queries = to_queries / g_q[:, None] / g_k  # <phi(q) / g(q), phi(k_j) / g(k_j)>
    projections = (at_queries - at_queries.mean(1, keepdim=True)) @ a.flip(1)[:, :3]
    attended = (to_queries / g_q[:, None]) @ kernel_pca_values(k[None])[0, :, :3]
    for mine, theirs in zip(attended.T, projections.T, strict=True):
        cosine = nn.functional.cosine_similarity(mine, theirs, dim=0)
        assert abs(float(cosine)) == pytest.approx(1, abs=1e-8)
    assert eigenvalues[-1] > 0


def test_values_in_the_span_have_all_their_energy_there():
    matrix = torch.randn(1, N, N, dtype=torch.float64).softmax(-1)
    vectors = right_singular_vectors(matrix)[..., :4]
    found = agreement(vectors, vectors @ torch.randn(1, 4, 5, dtype=torch.float64))
    assert found.share.item() == pytest.approx(1)
    assert found.share_by_chance.item() == pytest.approx(4 / N)
    ones = torch.ones(1, N, 2, dtype=torch.float64)
    assert agreement(vectors, ones).constant.item() == pytest.approx(1)
    assert found.constant < 0.9
    assert agreement(vectors, vectors[..., [2, 0]]).cosine.item() == pytest.approx(1)
    others = right_singular_vectors(matrix)[..., 4:9]
    assert agreement(vectors, others).share.item() == pytest.approx(0, abs=1e-12)


def test_chance_is_what_normal_values_have():
    vectors = torch.linalg.qr(torch.randn(N, 4, dtype=torch.float64)).Q
    found = agreement(vectors.expand(400, N, 4), torch.randn(400, N, 5, dtype=torch.float64))
    assert found.share.mean().item() == pytest.approx(4 / N, abs=0.01)


@torch.no_grad()
def test_a_layer_whose_values_are_singular_vectors_is_found_out():
    """One head, and values that do not depend on the attention matrix that they are made from."""
    layer = build_attention("softmax", N, 1).double().eval()
    x = torch.eye(N, dtype=torch.float64)[None]  # so that values are any matrix [N, N]
    random = value_alignment(layer, x)["SoftmaxAttention", "ksvd"]
    q, k = layer.q_proj(x), layer.k_proj(x)
    matrix = (q @ k.mT / N**0.5).softmax(-1)
    vectors = right_singular_vectors(matrix)[0, :, :3]
    layer.v_proj.weight.copy_((vectors @ torch.randn(3, N, dtype=torch.float64)).T)
    layer.v_proj.bias.zero_()
    found = value_alignment(layer, x, num_directions=3)["SoftmaxAttention", "ksvd"]
    assert found["share"] == pytest.approx(1)
    assert random["share"] < 0.9


def test_padding_counts_for_nothing_and_causal_layers_have_one_theory():
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 5:9] = False
    x = torch.randn(2, N, D)
    masked = {"x": torch.where(mask[..., None], x, torch.nan), "token_mask": mask}
    layer = build_attention("softmax", D, H)
    one, other = value_alignment(layer, masked), value_alignment(layer, [x[:1], x[1:, mask[1]]])
    assert [theory for _, theory in one] == [theory for _, theory in other]
    for key, numbers in one.items():
        assert numbers["share"] == pytest.approx(other[key]["share"], abs=1e-4)
    assert [theory for _, theory in one] == ["ksvd", "kernel_pca"]
    causal = value_alignment(build_attention("softmax", D, H, causal=True), x)
    assert [theory for _, theory in causal] == ["ksvd"]


class Padded(nn.Module):
    """A model called with tokens and the mask of the real ones."""

    def __init__(self):
        super().__init__()
        self.model = FAMILIES["bert"].model()

    def forward(self, tokens, mask):
        return FAMILIES["bert"].run(self.model, tokens, mask)


def test_values_of_a_host_are_compared_with_both_theories():
    found = value_alignment(Padded(), (FAMILIES["bert"].tokens(), real_tokens()))
    assert [theory for _, theory in found] == ["ksvd", "kernel_pca"] * 2
    assert all(0 < numbers["share"] <= 1 for numbers in found.values())
