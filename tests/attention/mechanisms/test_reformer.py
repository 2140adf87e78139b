"""Reformer: softmax over the union of the hash rounds, against the paper and two other codes."""

import warnings

import pytest
import torch

from primal_attention.attention.baselines.reformer import ReformerAttention
from primal_attention.testing import check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    LSHAttention = pytest.importorskip("reformer_pytorch").LSHAttention
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

M = 4  # the length of the chunks: 23 tokens make six


def build(**options):
    torch.manual_seed(0)
    options = {"num_hashes": 3, "bucket_size": M, "max_tokens": 16} | options
    return ReformerAttention(D, H, **options).double().eval()


def seen_by_token(layer, q, head):
    """The union of P_i over the rounds, for every token i, by the definitions."""
    n = len(q)
    directions = layer.rotations.shape[-1]
    if not layer.causal:
        directions = min(directions, -(-n // M))
    seen = [set() for _ in range(n)]
    for rotation in layer.rotations[head]:
        rotated = q.detach() @ rotation[:, :directions]
        buckets = torch.cat([rotated, -rotated], dim=-1).argmax(-1).tolist()
        order = sorted(range(n), key=lambda i: (buckets[i], i))
        slot = {token: place for place, token in enumerate(order)}
        for i in range(n):
            for j in range(n):
                if layer.causal:
                    near = 0 < slot[i] - slot[j] <= M
                else:
                    near = slot[i] // M - slot[j] // M in (0, 1)
                if near and buckets[i] == buckets[j] and i != j:
                    seen[i].add(j)
    for i in range(n):
        if n <= M or (layer.causal and i < M):
            seen[i] = set(range(i if layer.causal else n)) - {i}
    return seen


def published(layer):
    def one_head(q, k, v, head):
        k = k / k.norm(dim=-1, keepdim=True)
        rows = []
        for i, seen in enumerate(seen_by_token(layer, q, head)):
            keys = sorted(seen) or [i]
            rows.append((q[i] @ k[keys].T / C**0.5).softmax(-1) @ v[keys])
        return torch.stack(rows)

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_hashes", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_rounds_make_one_softmax_over_their_union(causal, num_hashes, mask):
    layer = build(causal=causal, num_hashes=num_hashes)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


def test_some_tokens_see_several_others_and_some_none():
    layer = build(num_hashes=1)
    numbers = [len(seen) for seen in seen_by_token(layer, layer.q_proj(randn(N, D))[:, :C], 0)]
    assert min(numbers) == 0
    assert max(numbers) > 2


@pytest.mark.parametrize("causal", [False, True])
def test_up_to_a_bucket_of_tokens_the_attention_is_exact(causal):
    layer = build(bucket_size=N, causal=causal)
    few = build(bucket_size=N + 5, causal=causal)
    few.load_state_dict(layer.state_dict())
    x = randn(B, N, D)
    assert_close(layer(x), few(x))

    def one_head(q, k, v, head):
        scores = q @ (k / k.norm(dim=-1, keepdim=True)).T / C**0.5
        scores.fill_diagonal_(-1e5)
        if causal:
            scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -1e9)
        return scores.softmax(-1) @ v

    assert_close(layer(x), by_sequence(layer, one_head, x))


def test_more_tokens_than_max_tokens_have_fuller_buckets():
    layer = build(max_tokens=8)
    assert layer.rotations.shape == (H, 3, C, 2)
    x = randn(B, N, D)
    assert_close(layer(x), by_sequence(layer, published(layer), x))


def drawn(layer, monkeypatch, repeats, dims):
    """Give the rotations of a layer, in another order of dimensions, to who asks for randn."""
    rotations = layer.rotations.permute(dims).contiguous()
    if repeats:
        rotations = rotations.repeat(repeats, 1, 1, 1)

    def randn_of(shape, **options):
        assert tuple(shape) == rotations.shape
        return rotations

    monkeypatch.setattr(torch, "randn", randn_of)


@pytest.mark.parametrize("causal", [False, True])
def test_against_reformer_pytorch(monkeypatch, causal):
    """Its options for the published sets; it has n / m buckets where the paper has 2 n / m.

    Causal, its chunks let a token see up to 2m - 1 tokens of its bucket, and ours the m before it:
    the same for tokens that are not beyond the m-th of their bucket in any round. Our first m
    tokens see all before them.
    """
    m, n = 8, 48
    layer = build(bucket_size=m, max_tokens=n // 2, causal=causal)
    other = LSHAttention(
        bucket_size=m,
        n_hashes=3,
        causal=causal,
        allow_duplicate_attention=False,
        attend_across_buckets=False,
        random_rotations_per_head=True,
    ).eval()
    x = randn(B, n, D)
    q, v = (each(x).unflatten(-1, (H, -1)) for each in (layer.q_proj, layer.v_proj))
    got = layer.attend(q, q, v, None, None).transpose(1, 2).flatten(0, 1)  # [B H, n, C]
    q, v = (z.transpose(1, 2).flatten(0, 1) for z in (q, v))
    with monkeypatch.context() as patch:
        drawn(layer, patch, B, (0, 2, 1, 3))
        want, _, buckets = other(q, v)
    same = torch.ones(B * H, n, dtype=torch.bool)
    if causal:
        buckets = buckets.unflatten(1, (3, n))
        before = (buckets[..., None] == buckets[..., None, :]).tril(-1).sum(-1)
        same = (before <= m).all(1)
        same[:, :m] = False
        assert same.sum() > n
    assert_close(got[same], want[same], 1e-7)  # it adds 1e-9 to the counts and takes logarithms


def huggingface(layer, chunk_length, num_buckets):
    """Its layer with our weights: its keys have the length 1 and no factor 1 / sqrt(C) follows."""
    config = ReformerConfig(
        hidden_size=D,
        num_attention_heads=H,
        attention_head_size=C,
        num_hashes=layer.num_hashes,
        num_buckets=num_buckets,
        lsh_attn_chunk_length=chunk_length,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=None,
        is_decoder=layer.causal,
    )
    other = LSHSelfAttention(config, layer_idx=0).double().eval()
    with torch.no_grad():
        other.query_key.weight.copy_(layer.q_proj.weight / C**0.5)
        other.value.weight.copy_(layer.v_proj.weight)
    return other


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("causal", [False, True])
def test_against_transformers_up_to_a_chunk_of_tokens(causal, mask):
    """Its keys are x / sqrt(|x|^2 / C + 1e-6), hence the tolerance."""
    layer = build(bucket_size=64, causal=causal, bias=False)
    other = huggingface(layer, 64, 2)
    x, token_mask = randn(B, N, D), MASKS[mask]
    want = layer.out_proj(other(x, attention_mask=token_mask).hidden_states)
    real = torch.ones(B, N, dtype=torch.bool) if token_mask is None else token_mask
    assert_close(layer(x, token_mask=token_mask)[real], want[real], 1e-5)


def test_against_transformers_where_all_hash_alike(monkeypatch):
    """It attends to whole chunks, whatever the buckets, and round about: the first to the last.

    So the two agree after the first chunk where all tokens share a bucket.
    """
    m, n = 4, 24
    layer = build(bias=False, max_tokens=8)
    other = huggingface(layer, m, 4)
    x = randn(1, 1, D, seed=1) + 0.05 * randn(B, n, D, seed=2)
    with monkeypatch.context() as patch:
        drawn(layer, patch, 0, (0, 2, 1, 3))
        result = other(x)
    assert result.buckets.flatten(0, 2).unique(dim=-1).shape[-1] == 1
    assert_close(layer(x)[:, m:], layer.out_proj(result.hidden_states)[:, m:], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_contract_of_the_hashed_form(causal):
    """By default the sequences of the contract are short enough for exact attention."""

    def factory():
        layer = ReformerAttention(12, 2, bucket_size=M, max_tokens=16, causal=causal)
        layer.contract_exemptions = {"autocast": "rounding moves tokens to other buckets"}
        if causal:
            again = dict.fromkeys(["compile", "export"], "asked of the other form")
            layer.contract_exemptions |= again
        return layer

    report = check_attention(factory, causal=causal)
    assert report["causality"].status == ("passed" if causal else "not applicable")


def test_the_largest_tensor_grows_linearly():
    layer = ReformerAttention(12, 2, bucket_size=8, max_tokens=64)
    short, long = largest_tensor(layer, 128), largest_tensor(layer, 512)
    assert long <= 4 * short


def test_rotations_are_drawn_in_training_only():
    layer, x = build(), randn(B, N, D)
    kept = layer.rotations.clone()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.rotations, kept)
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"q_proj", "v_proj", "out_proj", "rotations"}


@pytest.mark.parametrize("name", ["num_hashes", "bucket_size", "max_tokens"])
def test_bad_sizes_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        ReformerAttention(D, H, **{name: 0})


def test_a_context_is_refused():
    with pytest.raises(ValueError, match="ReformerAttention has no cross-attention"):
        build()(randn(B, N, D), randn(B, N, D))
