"""The matrix of every mechanism is the one it attends with."""

import pytest
import torch

from primal_attention import ATTENTIONS, PrimalAttention, build_attention
from primal_attention.analysis import attention_matrices, duality, spectrum
from primal_attention.analysis.capture import capture, find_layers
from primal_attention.objectives import ksvd_loss

D, H, N = 21, 3, 53
NO_MATRIX = {"yoso": "not linear", "longformer": "num_global_tokens=0"}
WITH_VALUES = [name for name in ATTENTIONS if name not in ("primal", "primal_time", *NO_MATRIX)]
FACTORED = {"linear", "linear_bn", "performer", "cosformer"}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def poisoned():
    """Two sequences, one with a hole, and NaN wherever there is no token."""
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 29:41] = False
    x = torch.randn(2, N, D)
    return {"x": torch.where(mask[..., None], x, torch.nan), "token_mask": mask}


def options(name):
    return {"num_global_tokens": 0, "window": 6} if name == "longformer" else {}


@pytest.mark.parametrize("name", [*WITH_VALUES, "longformer"])
def test_matrix_times_values_is_what_the_layer_outputs(name):
    layer = build_attention(name, D, H, **options(name)).double().eval()
    batch = poisoned()
    batch["x"] = batch["x"].double()
    expected = layer(**batch)
    ((_, run),) = capture(layer, batch)
    for b, (sequence, heads) in enumerate(zip(run.sequences(), run.matrices(), strict=True)):
        assert (heads.right is not None) == (name in FACTORED)
        out = heads.dense() @ sequence.v.transpose(0, 1)  # [H, n, C]
        y = layer.out_proj(out.transpose(0, 1).flatten(1))
        torch.testing.assert_close(y, expected[b, batch["token_mask"][b]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["softmax", "softmax_bn", "linear", "cosformer"])
def test_causal_matrices_are_triangular(name):
    layer = build_attention(name, D, H, causal=True)
    for _, heads in attention_matrices(layer, poisoned()):
        assert heads.right is None
        assert (heads.dense().triu(1) == 0).all()
        assert heads.dense().tril().abs().sum() > 0


@pytest.mark.parametrize("name", sorted(FACTORED))
def test_factors_have_the_singular_values_of_the_whole_matrix(name):
    layer = build_attention(name, D, H).double()
    for _, heads in attention_matrices(layer, torch.randn(2, N, D, dtype=torch.float64)):
        values = heads.singular_values()
        expected = torch.linalg.svdvals(heads.dense())[:, : values.shape[1]]
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)


def test_long_sequences_of_low_rank_have_no_matrix_of_all_pairs():
    N = 7_919  # whose square would take 0.5 GB a head
    for layer in (build_attention("linear", 6, 2), PrimalAttention(6, 2, 2)):
        ((_, heads),) = attention_matrices(layer, torch.randn(1, N, 6))
        assert heads.right is not None
        assert heads.shape == (2, N, N)
        assert heads.singular_values().shape[1] <= 11
        assert spectrum(layer, torch.randn(1, N, 6))[0].num_tokens.mean == N


@pytest.mark.parametrize("name", sorted(NO_MATRIX))
def test_what_has_no_matrix_is_said_to_have_none(name):
    with pytest.raises(ValueError, match=NO_MATRIX[name]):
        spectrum(build_attention(name, D, H), torch.randn(1, N, D))
    pair = torch.nn.Sequential(build_attention(name, D, H), build_attention("linear", D, H))
    found = spectrum(pair, torch.randn(1, N, D))
    assert [layer.name for layer in found.layers] == ["1"]
    assert NO_MATRIX[name] in found.skipped["0"]
    assert NO_MATRIX[name] in str(found)


@pytest.mark.parametrize("options", [{"decay": "learned"}, {"score_norm": True}], ids=str)
def test_linear_attention_with_a_time_or_a_norm_is_refused(options):
    with pytest.raises(ValueError, match="linear with decay or score_norm"):
        spectrum(build_attention("linear", D, H, **options), torch.randn(1, N, D))


PRIMAL = [
    {"weights": "static"},
    {"weights": "sampled"},
    {"weights": "dual"},
    {"weights": "static", "causal": True},
    {"weights": "dual", "causal": True},
    {"weights": "static", "feature_map": "exponential"},
    {"weights": "dual", "feature_map": "exponential"},
    {"weights": "static", "feature_map": "exponential", "causal": True},
    {"weights": "dual", "feature_map": "exponential", "causal": True},
    {"weights": "sampled", "feature_map": ("relu", "elu")},
]


CASES = [
    *((options, False) for options in PRIMAL),
    *((one, True) for one in PRIMAL if one["weights"] != "static" and "causal" not in one),
]


@pytest.mark.parametrize(("options", "crossing"), CASES, ids=str)
def test_the_kernel_of_a_primal_layer_is_that_of_its_objectives(options, crossing):
    """What the layer keeps for the objectives was computed by another path."""
    layer = PrimalAttention(D, H, 4, samples_per_direction=3, **options).double()
    batch = poisoned()
    batch["x"] = batch["x"].double()
    if crossing:
        batch["context"] = torch.randn(2, 31, D, dtype=torch.float64)
    layer.train()(**batch)
    (run,) = layer.passes.runs
    ((_, found),) = capture(layer, batch)
    assert found.crossing == crossing
    for b, sequence in enumerate(found.sequences()):
        torch.testing.assert_close(sequence.phi_q.mT @ sequence.phi_q, run.sums.grams.q[b])
        torch.testing.assert_close(sequence.phi_k.mT @ sequence.phi_k, run.sums.grams.k[b])
        weights = sequence.w_e, sequence.w_r
        if sequence.f_x is not None:
            torch.testing.assert_close(sequence.f_x, run.x_sampled[b])
            weights = [sequence.f_x.mT @ w for w in weights]
        for mine, its in zip(weights, run.sums.weights, strict=True):
            torch.testing.assert_close(mine, its if its.ndim == 3 else its[b])
    assert ksvd_loss(layer).isfinite()


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_of_a_layer_with_a_decay_is_what_its_scores_are_made_of(causal):
    """K H_r are the scores e of the pass in both directions, its triangle those of the causal."""
    layer = build_attention("primal_time", 8, 2, num_directions=4, causal=causal, rotary=True)
    layer, batch = layer.double().eval(), poisoned()
    batch["x"] = batch["x"][..., :8].double()
    scores = []
    layer.score_proj.register_forward_pre_hook(lambda module, args: scores.append(args[0]))
    layer.score_norm = False
    layer(**batch)
    ((_, run),) = capture(layer, batch)
    for b, sequence in enumerate(run.sequences()):
        kernel = sequence.kernel().dense()
        kernel = kernel.tril() if causal else kernel
        e = scores[0][b, batch["token_mask"][b], :, :4].transpose(0, 1)
        torch.testing.assert_close(kernel @ sequence.h[1], e)
    assert spectrum(layer, batch).layers


def test_duality_is_not_measured_with_a_decay():
    with pytest.raises(ValueError, match="have a decay, whose weights are another matrix"):
        duality(build_attention("primal_time", D, H), poisoned())


def test_the_kernel_of_sampled_weights_has_the_landmarks_in_the_middle():
    layer = PrimalAttention(D, H, 4, samples_per_direction=3).double()
    ((_, run),) = capture(layer, poisoned() | {"x": torch.randn(2, N, D, dtype=torch.float64)})
    for sequence in run.sequences():
        middle = sequence.f_x.mT @ sequence.f_x
        expected = torch.linalg.svdvals(sequence.phi_q @ middle @ sequence.phi_k.mT)
        values = sequence.kernel().singular_values()
        torch.testing.assert_close(values, expected[:, : values.shape[1]], rtol=1e-9, atol=1e-12)


def test_watching_leaves_a_layer_as_it_was():
    layer = build_attention("softmax", D, H).train()
    before = dict(vars(layer))
    spectrum(layer, poisoned())
    assert layer.training
    assert vars(layer).keys() == before.keys()
    assert not layer._forward_pre_hooks
    (found,) = find_layers(layer).found
    assert (found.name, found.attention, found.head_dim) == ("SoftmaxAttention", "softmax", 7)


def test_a_failing_model_is_left_as_it_was():
    layer = build_attention("softmax", D, H).train()
    with pytest.raises(ValueError, match="x must have shape"):
        spectrum(layer, torch.randn(2, N, D + 1))
    assert layer.training
    assert "attend" not in vars(layer)
