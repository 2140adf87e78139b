"""Transfer from a teacher: closed forms, training, what must not change, what is refused."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from primal_attention import patch
from primal_attention.patching import DistillReport, distill
from primal_attention.patching.distill.least_squares import (
    Moments,
    StreamedSums,
    reduced_rank,
    ridge,
)

from .families import D, albert, bert, gpt2, llama, torch_encoder, vit

B, N = 5, 11
MECHANISMS = {
    "static": ("primal", {"weights": "static"}),
    "sampled": ("primal", {"weights": "sampled", "max_tokens": 13}),
    "dual": ("primal", {"weights": "dual"}),
    "dual_few": ("primal", {"weights": "dual", "num_directions": 3}),
    "one_side": ("primal", {"weights": "dual", "scores": "e"}),
    "linear": ("linear", {}),
}


def masks() -> Tensor:
    lengths = torch.randint(3, N + 1, (B,))
    return torch.arange(N) < lengths[:, None]


def text(seed: int, number: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [
        {"input_ids": torch.randint(3, 31, (B, N)), "attention_mask": masks().long()}
        for _ in range(number)
    ]


def images(seed: int, number: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [{"pixel_values": torch.randn(B, 3, 12, 12)} for _ in range(number)]


def vectors(seed: int, number: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [{"src": torch.randn(B, N, D), "src_key_padding_mask": ~masks()} for _ in range(number)]


HOSTS = {
    "bert": (bert, text),
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "albert": (albert, text),
    "vit": (vit, images),
    "torch_encoder": (torch_encoder, vectors),
}


def pair(build, attention="primal", layers=-1, **options):
    """A teacher and its patched copy."""
    torch.manual_seed(3)
    teacher = build().eval()
    return patch(deepcopy(teacher), attention, layers, **{"num_directions": 5} | options), teacher


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", HOSTS)
def test_each_stage_lowers_the_error_on_held_out_batches(name):
    build, batches = HOSTS[name]
    model, teacher = pair(build, layers="all", weights="dual")
    report = distill(model, teacher, batches(0, 40), valid=batches(1, 4), steps=40)
    for errors in report.layers.values():
        assert errors.initialised < min(errors.patched, 1.0)
    trained = [errors.transferred for errors in report.layers.values()]
    initialised = [errors.initialised for errors in report.layers.values()]
    assert report.outputs.initialised < report.outputs.patched
    assert report.outputs.transferred < report.outputs.initialised
    assert sum(trained) < sum(initialised)
    assert report.steps > 0


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_initialisation_lowers_the_error_without_a_step(name):
    attention, options = MECHANISMS[name]
    torch.manual_seed(3)
    teacher = bert().eval()
    model = patch(deepcopy(teacher), attention, **options)
    report = distill(model, teacher, text(0, 40), valid=text(1, 4), steps=0, calibration=40)
    (errors,) = report.layers.values()
    assert errors.initialised < errors.patched
    assert errors.initialised < 1.0
    assert errors.transferred == errors.initialised
    assert report.steps == 0


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_what_a_primal_layer_can_express_is_found(weights):
    """A teacher that is a Primal layer itself, with other directions: the closed form has it."""
    torch.manual_seed(11)
    teacher = patch(bert().eval(), num_directions=5, weights=weights)
    model = deepcopy(teacher)
    with torch.no_grad():
        mechanism = model.encoder.layer[1].attention.self.mechanism
        for name in ("score_proj", "out_proj"):
            getattr(mechanism, name).weight.normal_()
    report = distill(model, teacher, text(0, 60), valid=text(1, 4), steps=0, calibration=60)
    (errors,) = report.layers.values()
    assert errors.patched > 1.0
    assert errors.initialised < (0.05 if weights == "static" else 0.5)


def test_a_layer_that_is_equal_already_stays():
    torch.manual_seed(3)
    teacher = bert()  # in training mode, which must not matter
    model = patch(deepcopy(teacher), "softmax")
    before = weights(model)
    report = distill(model, teacher, text(0, 8), steps=0, calibration=4)
    (errors,) = report.layers.values()
    assert errors.patched < 1e-9
    assert report.outputs.patched < 1e-9
    assert teacher.training
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, before[name])


def test_nothing_but_the_patched_layers_changes():
    model, teacher = pair(bert)
    model.train()
    model.pooler.requires_grad_(False)
    before, taught = weights(model), weights(teacher)
    learns = {name: p.requires_grad for name, p in model.named_parameters()}
    distill(model, teacher, text(0, 8), steps=4, calibration=4, match="layers+outputs")
    for name, tensor in weights(teacher).items():
        assert torch.equal(tensor, taught[name]), name
    new = ".layer.1.attention.self."
    after = weights(model)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        if new not in name:
            assert torch.equal(tensor, before[name]), name
    assert not torch.equal(
        after["encoder.layer.1.attention.self.mechanism.w_e"],
        before["encoder.layer.1.attention.self.mechanism.w_e"],
    )
    assert learns == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in teacher.modules())
    assert type(teacher.encoder.layer[1].attention.self).__name__ == "BertSelfAttention"


def longer_by_padding(batch):
    """The same real tokens, with large numbers at the padding and more of it."""
    padding = torch.nn.functional.pad(batch["src_key_padding_mask"], (0, 3), value=True)
    x = torch.nn.functional.pad(batch["src"], (0, 0, 0, 3))
    return {"src": x.masked_fill(padding[..., None], 1e4), "src_key_padding_mask": padding}


def test_padding_makes_no_difference():
    results = []
    for change in (dict, longer_by_padding):
        model, teacher = pair(torch_encoder, layers="all", weights="dual")
        batches = [change(batch) for batch in vectors(0, 8)]
        report = distill(model, teacher, batches, steps=4, calibration=4, match="layers+outputs")
        results.append((weights(model), report))
    (expected, report), (actual, padded) = results
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-5)
    assert padded.num_valid == report.num_valid
    assert padded.outputs == pytest.approx(report.outputs, rel=1e-3)
    for name, errors in report.layers.items():
        assert padded.layers[name] == pytest.approx(errors, rel=1e-3)


def test_a_layer_that_is_causal_by_option():
    model, teacher = pair(torch_encoder, weights="dual", causal=True)
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    batches = [{"src": batch["src"], "mask": future} for batch in vectors(0, 40)]
    report = distill(model, teacher, batches, steps=0)
    (errors,) = report.layers.values()
    assert errors.initialised < min(errors.patched, 1.0)


def test_the_seed_decides_and_the_callers_random_numbers_do_not_change():
    states = []
    for seed in (0, 0, 1):
        model, teacher = pair(bert)
        batches = text(0, 8)
        random_state = torch.get_rng_state()
        distill(model, teacher, batches, steps=3, calibration=3, seed=seed)
        assert torch.equal(torch.get_rng_state(), random_state)
        states.append(weights(model))
    name = "encoder.layer.1.attention.self.mechanism.w_e"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


def test_batches_may_be_read_once():
    reports = []
    given = text(0, 7)
    for batches in (given, iter(given)):
        model, teacher = pair(bert)
        reports.append(distill(model, teacher, batches, steps=6, calibration=2))
    assert reports[0].layers == reports[1].layers


def test_progress_and_the_printed_report():
    events = []
    model, teacher = pair(bert, layers="all")
    report = distill(model, teacher, text(0, 8), steps=6, calibration=2, progress=events.append)
    stages = list(dict.fromkeys(event.stage for event in events))
    assert len(stages) == 3
    assert all(1 <= event.done <= event.total for event in events)
    assert any(event.error is not None for event in events)
    assert isinstance(report, DistillReport)
    printed = str(report)
    for name in (*report.layers, "model outputs", "transferred"):
        assert name in printed


def test_errors_name_the_argument():
    model, teacher = pair(bert)
    batches = text(0, 8)
    with pytest.raises(ValueError, match="model: BertModel has no patched layer"):
        distill(teacher, model, batches)
    with pytest.raises(ValueError, match="teacher is the model itself"):
        distill(model, model, batches)
    with pytest.raises(ValueError, match=r"teacher has no attention at encoder\.layer\.1"):
        distill(model, bert(num_hidden_layers=1), batches)
    with pytest.raises(ValueError, match="batches has 2 batches"):
        distill(model, teacher, batches[:2])
    with pytest.raises(ValueError, match="valid has no batch"):
        distill(model, teacher, batches, valid=[])
    with pytest.raises(ValueError, match="batches must give mappings"):
        distill(model, teacher, [torch.zeros(2, 3)] * 8)
    with pytest.raises(ValueError, match="batches must be an iterable of batches, got int"):
        distill(model, teacher, 7)
    with pytest.raises(ValueError, match="match"):
        distill(model, teacher, batches, match="logits")
    with pytest.raises(ValueError, match="steps must not be negative, got -1"):
        distill(model, teacher, batches, steps=-1)
    with pytest.raises(ValueError, match="lr must be positive"):
        distill(model, teacher, batches, lr=0.0)


def test_a_loss_that_is_not_finite_is_an_error():
    model, teacher = pair(torch_encoder, layers="all")
    batches = [batch | {"src": batch["src"] * torch.nan} for batch in vectors(0, 8)]
    with pytest.raises((ValueError, torch.linalg.LinAlgError)):
        distill(model, teacher, batches, valid=vectors(1, 2), steps=2, calibration=0)


def test_ridge_and_reduced_rank_are_least_squares():
    torch.manual_seed(0)
    f = torch.randn(211, 7, dtype=torch.float64)
    y = f @ torch.randn(7, 5, dtype=torch.float64) + torch.randn(5, dtype=torch.float64)
    sums = StreamedSums(centred=True)
    for part in range(0, 211, 23):
        sums.add(f[part : part + 23], y[part : part + 23])
    moments = sums.moments()
    centred = f - f.mean(0)
    torch.testing.assert_close(moments.gram, centred.mT @ centred)
    fitted = ridge(moments, 1e-9)
    exact = torch.linalg.lstsq(centred, y - y.mean(0)).solution
    torch.testing.assert_close(fitted, exact, rtol=1e-6, atol=1e-6)
    assert sums.penalty() == 1e-4
    inner, outer = reduced_rank(moments, 2, 1e-9)
    assert inner.shape == (7, 2)
    best = torch.linalg.svdvals(centred @ exact)[2:].square().sum()
    error = (centred @ inner @ outer - (y - y.mean(0))).square().sum()
    torch.testing.assert_close(error, best, rtol=1e-6, atol=1e-6)


def test_noise_gets_the_largest_penalty():
    torch.manual_seed(0)
    sums = StreamedSums(centred=False)
    for _ in range(4):
        sums.add(torch.randn(17, 13), torch.randn(17, 3))
    assert sums.penalty() >= 1.0
    gram = torch.zeros(2, 2, dtype=torch.float64)
    assert ridge(Moments(gram, gram), 1e-2).abs().max() == 0  # a feature that is always zero
