"""Language models: the full pass, the state, and generation."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.attention import ATTENTIONS
from primal_attention.models import LanguageModel, build_attentions
from primal_attention.models.language import sinusoids

from .small import FFN, MASK, B, D, H, N, V, gradients, randomise, symbols

DECODING = [name for name, layer in ATTENTIONS.items() if layer.mechanism.decode]
CONSTANT = ["static", "dual", "linear", "performer", "flow", "cosformer"]


def attentions(name, num_layers=2, **options):
    if name in ("static", "dual"):
        return attentions("primalformer", num_layers, weights=name, num_directions=3)
    model = {"primal": "primalformer", "primal_time": "primalformer_time"}.get(name, name)
    return build_attentions(model, num_layers, D, H, causal=True, **options)


def language_model(name="static", **options):
    torch.manual_seed(0)
    model = LanguageModel(V, attentions(name), D, FFN, **options)
    return randomise(model.double()).eval()


decoding = pytest.mark.parametrize("name", ["dual", "primal_plus", *DECODING])


def test_every_mechanism_with_a_decode_state_is_tried():
    assert set(DECODING) >= {"primal", "softmax", "linear", "performer", "flow", "cosformer"}


@decoding
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_prompt_and_steps_equal_the_full_pass(name, norm):
    model, ids = language_model(name, norm=norm), symbols()
    full = model(ids)
    first, state = model.prefill(ids[:, :4])
    second, state = model.prefill(ids[:, 4:6], state)
    parts = [first, second]
    for t in range(6, N):
        logits, state = model.step(ids[:, t], state)
        parts.append(logits[:, None])
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-9, atol=1e-9)
    assert torch.equal(state.position, torch.full((B,), N))


@decoding
def test_no_token_sees_a_later_one(name):
    model, ids = language_model(name), symbols()
    changed = ids.clone()
    changed[:, 6:] = (ids[:, 6:] + 1) % V
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])


@decoding
def test_padding_anywhere_changes_no_real_token(name):
    model, ids = language_model(name), symbols()
    logits = model(torch.where(MASK, ids, -(10**9)), token_mask=MASK)
    for i in range(B):
        alone = model(ids[i : i + 1, MASK[i]])
        torch.testing.assert_close(logits[i : i + 1, MASK[i]], alone, rtol=1e-9, atol=1e-9)


def greedy(model, ids, num_new):
    """By a full pass over everything written so far, for each token."""
    for _ in range(num_new):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@decoding
def test_greedy_generation_is_the_argmax_of_full_passes(name):
    model, prompt = language_model(name), symbols(length=3)
    written = model.generate(prompt, 13, temperature=0.0)
    assert torch.equal(written, greedy(model, prompt, 13))
    assert torch.equal(written, model.generate(prompt, 13, top_k=1))
    assert torch.equal(written, model.generate(prompt, 13, temperature=5e-324))
    assert len(written[:, 3:].unique()) > 1


def state_bytes(state):
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(state))


@pytest.mark.parametrize("name", CONSTANT)
def test_the_state_has_a_constant_size(name):
    model = language_model(name)
    _, short = model.prefill(symbols(length=1))
    _, long = model.prefill(symbols(length=257))
    _, longer = model.step(symbols(length=1)[:, 0], long)
    empty = model.init_state(B)
    assert {state_bytes(s) for s in (empty, short, long, longer)} == {state_bytes(empty)}


def test_the_cache_of_softmax_grows():
    model = language_model("softmax")
    sizes = [state_bytes(model.prefill(symbols(length=n))[1]) for n in (5, 10, 20)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) > 0


def test_generation_goes_far_beyond_what_was_trained():
    model = language_model("static").float()
    written = model.generate(symbols(length=2), 300, temperature=0.0)
    assert written.shape == (B, 302)
    torch.testing.assert_close(written[:, :2], symbols(length=2))


def test_draws_follow_the_probabilities_of_the_model():
    model = language_model()
    prompt = symbols(length=3)[:1].expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 4), (1.0, 1000)):
        drawn = model.generate(
            prompt, 1, temperature=temperature, top_k=top_k, generator=generator
        )[:, -1]
        expected = probabilities(model(prompt[:1])[0, -1], temperature, top_k)
        frequencies = drawn.bincount(minlength=V) / len(prompt)
        assert (frequencies - expected).abs().max() < 0.02
        assert not frequencies[expected == 0].any()


def probabilities(logits, temperature, top_k):
    weights = (logits / temperature).exp()
    if top_k is not None and top_k < V:
        weights[logits < logits.sort(descending=True).values[top_k - 1]] = 0
    return weights / weights.sum()


def test_draws_repeat_with_the_generator():
    model, prompt = language_model(), symbols(length=3)
    written = [
        model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[0], written[2])


def test_sequences_of_a_state_can_be_chosen():
    """All that a state holds has the batch first, so it can be reordered, as beams are."""
    model, ids = language_model("dual"), symbols()
    order = torch.tensor([2, 0, 0, 1])
    _, state = model.prefill(ids)
    chosen = tree_map(lambda tensor: tensor[order], state)
    logits, _ = model.step(ids[order, 0], chosen)
    expected = model(torch.cat([ids, ids[:, :1]], dim=1))[order, -1]
    torch.testing.assert_close(logits, expected)


def test_one_table_reads_and_writes():
    model = language_model("softmax")
    assert sum(V in p.shape for p in model.parameters()) == 1
    x = model.tokens.weight[symbols()] * math.sqrt(D) + sinusoids(torch.arange(N), D)
    expected = model.decoder(x) @ model.tokens.weight.T
    torch.testing.assert_close(model(symbols()), expected)


@pytest.mark.parametrize("dim", [10, 7, 1])
def test_positions_are_the_sinusoids_of_the_paper(dim):
    table = sinusoids(torch.tensor([0, 5, 10**6]), dim)
    assert table.shape == (3, dim)
    half = (dim + 1) // 2
    for row, t in enumerate([0, 5, 10**6]):
        for j in range(dim):
            wave = math.sin if j < half else math.cos
            angle = t / 10_000 ** (2 * (j % half) / dim)
            assert table[row, j].item() == pytest.approx(wave(angle), abs=1e-9)


def test_a_model_trains_with_its_objective():
    torch.manual_seed(0)
    for name in ("static", "dual", "primal_plus"):
        model, ids = language_model(name, dropout=0.1).train(), symbols()
        loss = model(ids, token_mask=MASK).logsumexp(-1).mean() + ksvd_loss(model)
        by_name = gradients(model, loss)
        assert by_name.keys() == dict(model.named_parameters()).keys()
        assert all(grad.isfinite().all() for grad in by_name.values())


def test_generation_keeps_no_graph_and_leaves_no_statistics():
    model, outputs = language_model("static").train(), []
    model.decoder.final_norm.register_forward_hook(lambda *args: outputs.append(args[-1]))
    model.generate(symbols(length=3), 3)
    assert [y.requires_grad for y in outputs] == [False] * 3
    assert not any(m.passes.runs for m in model.modules() if isinstance(m, PrimalAttention))


def test_dropout_is_for_training_alone():
    model, still = language_model("softmax", dropout=0.4), language_model("softmax")
    ids = symbols()
    assert torch.equal(model(ids), still(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_dropout_reaches_the_tokens():
    model, seen = language_model("softmax", dropout=1 - 1e-9).train(), []
    model.decoder.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    model(symbols())
    assert not seen[0].any()


def test_a_mechanism_without_a_state_trains_but_does_not_decode():
    model = language_model("reformer")
    assert model(symbols()).shape == (B, N, V)
    with pytest.raises(ValueError, match="layer 0: ReformerAttention has no decode state"):
        model.generate(symbols(), 3)


def test_bad_input_is_named():
    mixed = [*attentions("static", 1), *build_attentions("softmax", 1, D, H)]
    with pytest.raises(ValueError, match=r"attentions\[1\], SoftmaxAttention, is not causal"):
        LanguageModel(V, mixed, D, FFN)
    with pytest.raises(ValueError, match=r"attentions\[0\], Identity, is not causal"):
        LanguageModel(V, [torch.nn.Identity()], D, FFN)
    with pytest.raises(ValueError, match="vocab_size must be a positive integer, got 0"):
        LanguageModel(0, attentions("static"), D, FFN)
    model, ids = language_model(), symbols()
    with pytest.raises(ValueError, match="ids must be integers"):
        model(ids.double())
    with pytest.raises(ValueError, match="token_mask must be a bool tensor"):
        model(ids, token_mask=MASK.long())
    with pytest.raises(ValueError, match="max_new_tokens must be a positive integer, got 0"):
        model.generate(ids, 0)
    with pytest.raises(ValueError, match="top_k must be a positive integer, got 0"):
        model.generate(ids, 1, top_k=0)
    with pytest.raises(ValueError, match="temperature must be finite and not negative, got -1"):
        model.generate(ids, 1, temperature=-1.0)
    with pytest.raises(ValueError, match="state is of 3 sequences, ids of 2"):
        model.prefill(ids[1:], model.init_state(3))
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(ids[:, :0], 1)
