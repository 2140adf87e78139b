"""The patched Decision Transformer: what it sees, and how it acts step by step."""

import pytest
import torch

from primal_attention.attention import ATTENTIONS
from primal_attention.models.decision_transformer import build_decision, keep_episodes
from primal_attention.tasks.offline_rl import policy_of

B, S, A, K = 3, 11, 2, 7
CAUSAL = [name for name, each in ATTENTIONS.items() if each.mechanism.causal]
OTHERS = [name for name in CAUSAL if not name.startswith("primal")]
MODELS = ["primal_plus", "primalformer", "primal_time_plus", "primalformer_time", *OTHERS]
STEPPING = [name for name in MODELS if name != "reformer"]  # which has no state


def model_of(name, num_tokens=3 * 31, layers=3):
    torch.manual_seed(0)
    sizes = {"dim": 12, "num_layers": layers, "num_heads": 2, "ffn_dim": 17}
    model = build_decision(
        name,
        state_dim=S,
        action_dim=A,
        sizes={**sizes, "num_tokens": num_tokens},
        dropout=0.1,
        max_steps=100,
        options={"num_directions": 5} if "primal" in name else {},
    ).eval()
    with torch.no_grad():  # far from where each token has little to say to others
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 0.1))
    return model


def episodes(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "states": torch.randn(B, steps, S, generator=generator),
        "actions": torch.randn(B, steps, A, generator=generator).clamp(-1, 1),
        "returns_to_go": torch.randn(B, steps, 1, generator=generator),
        "timesteps": torch.arange(steps).expand(B, -1),
    }


@pytest.mark.parametrize("name", MODELS)
def test_an_action_sees_the_past_and_its_own_state_alone(name):
    model, inputs = model_of(name), episodes(K)
    mask = torch.arange(K) < 4
    padded = {key: each.clone() for key, each in inputs.items()}
    for key in ("states", "actions", "returns_to_go"):
        padded[key][:, 4:] = torch.nan
    padded["actions"][:, 3] = 9.0  # that of the step itself
    with torch.no_grad():
        whole = model(**inputs)[:, :4]
        found = model(**padded, token_mask=mask.expand(B, -1))[:, :4]
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)
    inputs["actions"][:, 1] += 1
    with torch.no_grad():
        changed = (model(**inputs)[:, :4] - whole).abs().amax((0, 2))
    assert (changed[:2] < 1e-5).all()
    assert (changed[2:] > 1e-4).all()


@torch.no_grad()
@pytest.mark.parametrize("name", STEPPING)
def test_step_by_step_is_the_full_pass_at_any_length(name):
    steps = 29
    model, inputs = model_of(name), episodes(steps)
    past, found = model.begin(), []
    for k in range(steps):
        action, past = model.act(inputs["states"][:, k], inputs["returns_to_go"][:, k], past)
        found.append(action)
        past = past._replace(action=inputs["actions"][:, k])
    torch.testing.assert_close(torch.stack(found, 1), model(**inputs), atol=1e-5, rtol=0)


def acted(model, mode, steps, kept=None):
    """What a policy does in states that do not depend on it."""
    inputs, policy, found = episodes(steps), policy_of(model, mode, K), []
    rows = torch.arange(B)
    for k in range(steps):
        if kept is not None and k == 2:
            policy.keep(kept)
            rows = kept
        found.append(policy.act(inputs["states"][rows, k], inputs["returns_to_go"][rows, k]))
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "primal_plus", "primalformer", "flow"])
def test_both_modes_agree_within_the_window_and_differ_after_it(name):
    model = model_of(name)
    window, state = (torch.stack(acted(model, mode, K + 4), 1) for mode in ("window", "state"))
    torch.testing.assert_close(window[:, :K], state[:, :K], atol=1e-5, rtol=0)
    assert (window - state)[:, K:].abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("mode", ["window", "state"])
@pytest.mark.parametrize("name", ["softmax", "primal_plus", "primalformer"])
def test_episodes_that_are_over_leave_the_others_alone(name, mode):
    model, kept = model_of(name), torch.tensor([0, 2])
    whole, fewer = acted(model, mode, 9), acted(model, mode, 9, kept)
    for all_of_them, some in zip(whole[2:], fewer[2:], strict=True):
        torch.testing.assert_close(some, all_of_them[kept], atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_window_holds_the_last_steps():
    model, steps = model_of("softmax"), K + 4
    inputs, done = episodes(steps), torch.stack(acted(model, "window", steps), 1)
    last = {key: each[:, -K:] for key, each in (inputs | {"actions": done}).items()}
    torch.testing.assert_close(model(**last)[:, -1], done[:, -1], atol=1e-5, rtol=0)


@torch.no_grad()
def test_what_is_remembered_does_not_grow():
    model, inputs = model_of("primalformer"), episodes(23)
    past, sizes = model.begin(), []
    for k in range(23):
        _, past = model.act(inputs["states"][:, k], inputs["returns_to_go"][:, k], past)
        states = [layer.state for layer in past.cache.layers]
        sizes.append(sum(tensor.numel() for state in states for tensor in state))
    assert len(set(sizes)) == 1
    assert keep_episodes(past, torch.tensor([1])).action.shape == (1, A)


def test_mistakes_are_named():
    model = model_of("reformer")
    with pytest.raises(ValueError, match="mode must be one of window, state"):
        policy_of(model, "whole", K)
    with pytest.raises(ValueError, match="reformer has no decode state"):
        acted(model, "state", 2)
    with pytest.raises(ValueError, match="causal"):
        model_of("nystrom")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["window", "state"])
@pytest.mark.parametrize("name", ["softmax", "primal_plus", "linear", "flow"])
def test_a_model_on_a_gpu_acts_alike(name, mode):
    kept = torch.tensor([0, 2])
    here = acted(model_of(name), mode, K + 4, kept)
    there = acted(model_of(name).cuda(), mode, K + 4, kept)
    torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-4)  # a list, on the CPU
