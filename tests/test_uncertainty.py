"""Gaussian scores: the paper's posterior and divergence, masks, draws, and the training loop."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from primal_attention import PrimalAttention
from primal_attention.attention import build_attention
from primal_attention.training import Recipe, launch, train, trained_model
from primal_attention.uncertainty import (
    GaussianScores,
    add_uncertainty,
    is_uncertain,
    kl_divergence,
    log_predictive,
    posterior_samples,
)
from tests.training.toy import toy_task

B, N, D, H, S = 3, 7, 8, 2, 3


def scores(num_sides: int = 2, **options) -> GaussianScores:
    torch.manual_seed(0)
    module = GaussianScores(H, S, num_sides, **options).double()
    with torch.no_grad():
        module.mean.normal_()
        module.raw_factor.add_(0.5 * torch.randn_like(module.raw_factor))
    return module


def layer(**options) -> PrimalAttention:
    torch.manual_seed(0)
    return PrimalAttention(D, H, S, **options).double()


def test_mean_and_covariance_are_those_of_the_sparse_process():
    """K_fu = E Lambda and K_uu = Lambda^2 leave K_fu K_uu^-1 q(u) K_uu^-1 K_uf."""
    module, cases = scores(initial_std=0.7).eval(), 100_000
    rows = torch.randn(N, H, 2 * S, dtype=torch.float64)
    lambda_diag = torch.rand(S, dtype=torch.float64) + 0.5
    inverse = lambda_diag.square().reciprocal().diag()
    with torch.no_grad(), posterior_samples(module):
        drawn = module(rows.expand(cases, *rows.shape))
    mean = module(rows[None])[0]
    for head in range(H):
        for column in range(2 * S):
            side, output = divmod(column, S)
            e = rows[:, head, side * S : (side + 1) * S]
            cross = e @ lambda_diag.diag()
            m = lambda_diag * module.mean[head, side, output]
            factor = lambda_diag.diag() @ module.factor()[head, side, output]
            torch.testing.assert_close(mean[:, head, column], cross @ inverse @ m)
            covariance = cross @ inverse @ factor @ factor.T @ inverse @ cross.T
            sampled = drawn[:, :, head, column].T.cov()
            assert (sampled - covariance).abs().max() < 0.03 * covariance.abs().max()
            assert (drawn[:, :, head, column].mean(0) - mean[:, head, column]).abs().max() < (
                0.02 * covariance.max().sqrt()
            )


@pytest.mark.parametrize("num_sides", [1, 2])
def test_divergence_is_that_of_the_inducing_variables(num_sides):
    module = scores(num_sides)
    lambda_diag = torch.rand(S, dtype=torch.float64) + 0.5
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(S, dtype=torch.float64), scale_tril=lambda_diag.diag()
    )
    posterior = torch.distributions.MultivariateNormal(
        lambda_diag * module.mean, scale_tril=lambda_diag.diag() @ module.factor()
    )
    expected = torch.distributions.kl_divergence(posterior, prior).sum()
    torch.testing.assert_close(module.kl_divergence(), expected)
    prior_itself = GaussianScores(H, S, initial_std=1.0)
    nn.init.zeros_(prior_itself.mean)
    assert abs(prior_itself.kl_divergence().item()) < 1e-6


def test_gradients():
    module = scores()
    rows = torch.randn(B, 2, H, 2 * S, dtype=torch.float64, requires_grad=True)

    def outputs(rows, mean, raw_factor):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            values = {"mean": mean, "raw_factor": raw_factor}
            drawn = torch.func.functional_call(module.train(), values, rows)
        divergence = torch.func.functional_call(Divergence(module), values_of(values), ())
        return drawn, divergence

    assert torch.autograd.gradcheck(outputs, (rows, module.mean, module.raw_factor))


class Divergence(nn.Module):
    def __init__(self, scores: GaussianScores):
        super().__init__()
        self.scores = scores

    def forward(self):
        return kl_divergence(self)


def values_of(values):
    return {f"scores.{name}": each for name, each in values.items()}


@pytest.mark.parametrize("name", ["primal", "primal_time"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_the_mean_is_the_plain_layer_at_first(name, options):
    if options and name == "primal":
        options = {**options, "weights": "auto"}
    torch.manual_seed(0)
    plain = build_attention(name, D, H, num_directions=S, **options).eval()
    x = torch.randn(B, N, D)
    uncertain = add_uncertainty(deepcopy(plain))
    torch.testing.assert_close(uncertain(x), plain(x))
    assert is_uncertain(uncertain) and not is_uncertain(plain)


@pytest.mark.parametrize("weights", ["sampled", "static", "dual"])
@pytest.mark.parametrize("side", ["both", "e", "r"])
def test_padding_and_draws(weights, side):
    model = add_uncertainty(layer(weights=weights, scores=side)).eval()
    x = torch.randn(1, N, D, dtype=torch.float64).expand(B, N, D).contiguous()
    mask = torch.arange(N) < torch.tensor([[N], [N], [4]])
    with posterior_samples(model):
        torch.manual_seed(3)
        y = model(x, token_mask=mask)
        torch.manual_seed(3)
        torch.testing.assert_close(
            model(torch.where(mask[..., None], x, 9.0), token_mask=mask), y, rtol=0, atol=0
        )
        assert not torch.equal(model(x, token_mask=mask), y)
    assert (y[~mask] == 0).all()
    assert not torch.allclose(y[0], y[1])  # one sequence twice, two draws
    mean = model(x, token_mask=mask)
    assert torch.equal(mean[0], mean[1])
    model.train()
    assert not torch.allclose(*model(x)[:2])


def test_one_function_for_the_tokens_of_a_sequence():
    module = scores().train()
    twice = torch.randn(1, 1, H, 2 * S, dtype=torch.float64).expand(1, 2, H, 2 * S)
    first, second = module(twice)[0]
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = add_uncertainty(layer().to(dtype)).train()
    y = model(torch.randn(B, N, D, dtype=dtype))
    divergence = kl_divergence(model)
    (y.float().square().mean() + divergence).backward()
    assert y.dtype == dtype and divergence.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.score_proj.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert add_uncertainty(layer().float()).train()(torch.randn(B, N, D)).isfinite().all()


def test_state_dict_and_copy():
    model = add_uncertainty(layer())
    kl_divergence(model).backward()
    with torch.no_grad():
        model.score_proj[0].mean.normal_()
    other = add_uncertainty(layer(), initial_std=0.5)
    other.load_state_dict(model.state_dict())
    x = torch.randn(B, N, D, dtype=torch.float64)
    for each in (other, deepcopy(model)):
        torch.testing.assert_close(each.eval()(x), model.eval()(x), rtol=0, atol=0)
        torch.testing.assert_close(kl_divergence(each), kl_divergence(model))


def test_compiled():
    module = torch.compile(scores(), backend="eager", fullgraph=True)
    rows = torch.randn(B, N, H, 2 * S, dtype=torch.float64)
    for mode in (True, False):
        module.train(mode)
        torch.manual_seed(0)
        drawn = module(rows)
        torch.manual_seed(0)
        torch.testing.assert_close(drawn, module._orig_mod(rows))


def test_layers_by_index():
    model = nn.ModuleList([layer() for _ in range(3)])
    add_uncertainty(model, layers=[0, -1])
    assert [is_uncertain(each) for each in model] == [True, False, True]
    each = [kl_divergence(model[index]) for index in (0, 2)]
    torch.testing.assert_close(kl_divergence(model), sum(each))


def test_errors():
    with pytest.raises(ValueError, match=r"layers=3 .* 1 Primal layers"):
        add_uncertainty(layer(), layers=3)
    with pytest.raises(ValueError, match="0 Primal layers of Linear"):
        add_uncertainty(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="add uncertainty once"):
        add_uncertainty(add_uncertainty(layer()))
    with pytest.raises(ValueError, match="fold needs plain"):
        add_uncertainty(layer(weights="static")).fold()
    with pytest.raises(ValueError, match="no Gaussian scores"):
        kl_divergence(layer())
    with pytest.raises(ValueError, match=r"initial_std .*got 0"):
        GaussianScores(H, S, initial_std=0)


class Pooled(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x).mean(1)


def test_probabilities_are_averaged_over_draws():
    model = Pooled(add_uncertainty(layer(), initial_std=1.0)).eval()
    x = torch.randn(B, N, D, dtype=torch.float64)
    torch.manual_seed(5)
    found = log_predictive(model, x, draws=4)
    torch.manual_seed(5)
    with posterior_samples(model):
        each = [model(x).softmax(-1) for _ in range(4)]
    torch.testing.assert_close(found.exp(), sum(each) / 4)
    assert not model.attention.score_proj[0].drawing


def test_recipes_train_with_the_divergence_in_the_loss():
    recipe = Recipe(
        "toy/toy",
        "primalformer",
        dim=16,
        num_heads=2,
        ffn_dim=16,
        epochs=2,
        eval_every=2,
        optimizer="adam",
        lr=0.1,
        uncertainty=True,
        attention={"num_directions": 4},
    )
    task, fabric = toy_task(), launch("fp32", accelerator="cpu")
    weights = {
        weight: train(recipe.replace(kl_weight=weight), task, fabric).weights
        for weight in (0.0, 1e4)
    }
    divergences = [
        kl_divergence(trained_model(recipe, task.sizes, each)).item() for each in weights.values()
    ]
    assert divergences[1] < 0.9 * divergences[0]
    assert Recipe.from_json(recipe.to_json()).model.uncertainty
