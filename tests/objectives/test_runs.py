"""Which forward passes an objective is made of: the layers of a model, record_ksvd, the latest."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from primal_attention import record_ksvd

from .cases import SELF, Stack, assert_near, gradients, loss_of, make_inputs, make_layer
from .definition import OBJECTIVES, layer_objective, objective_of_layers, runs

objectives = pytest.mark.parametrize("objective", OBJECTIVES)
kinds = pytest.mark.parametrize("kind", SELF)


def halves(inputs):
    """The first three sequences and the other four."""
    for part in (slice(0, 3), slice(3, None)):
        masks = {name: mask[part] for name, mask in inputs.masks.items()}
        yield inputs._replace(x=inputs.x[part], masks=masks)


@objectives
def test_layers_are_summed_for_zero_and_averaged_for_the_others(objective):
    model = nn.ModuleList(make_layer(kind, seed=i) for i, kind in enumerate(SELF))
    inputs = [make_inputs(kind, seed=i) for i, kind in enumerate(SELF)]
    for layer, given in zip(model, inputs, strict=True):
        given.run(layer)
    expected = objective_of_layers(
        [runs(m, i.x, **i.masks) for m, i in zip(model, inputs, strict=True)], objective
    )
    actual = loss_of(model, objective)
    assert_near(actual, expected)
    tensors = [given.x for given in inputs]
    assert_near(gradients(actual, model, tensors), gradients(expected, model, tensors))


@objectives
@kinds
def test_gradients_pass_from_a_later_layer_through_an_earlier_one(kind, objective):
    model, inputs = Stack(kind), make_inputs(kind)
    inputs.run(model)
    middle = inputs.x + model.first(inputs.x, **inputs.masks)
    taken = [
        runs(model.first, inputs.x, **inputs.masks),
        runs(model.second, middle, **inputs.masks),
    ]
    actual, expected = loss_of(model, objective), objective_of_layers(taken, objective)
    assert_near(actual, expected)
    assert_near(gradients(actual, model, [inputs.x]), gradients(expected, model, [inputs.x]))


@objectives
def test_layer_that_did_not_run_is_left_out(objective):
    model, inputs = Stack("sampled"), make_inputs()
    inputs.run(model.first)
    assert_near(loss_of(model, objective), loss_of(model.first, objective))


@objectives
def test_layer_used_under_two_names_counts_once(objective):
    layer, inputs = make_layer("sampled"), make_inputs()
    inputs.run(layer)
    assert_near(loss_of(nn.ModuleList([layer, layer]), objective), loss_of(layer, objective))


@objectives
@kinds
def test_two_towers_equal_one_batch(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    inputs.run(layer)
    whole = loss_of(layer, objective)
    expected = gradients(whole, layer, [inputs.x])
    with record_ksvd(layer):
        for half in halves(inputs):
            half.run(layer)
        towers = loss_of(layer, objective)
    assert_near(towers, whole)
    assert_near(gradients(towers, layer, [inputs.x]), expected)


@objectives
def test_towers_may_have_different_lengths(objective):
    layer, inputs = make_layer("sampled"), make_inputs()
    short = inputs._replace(x=inputs.x[:2, :13], masks={})
    with record_ksvd(layer):
        inputs.run(layer), short.run(layer)
    taken = runs(layer, inputs.x, **inputs.masks) + runs(layer, short.x)
    assert_near(loss_of(layer, objective), layer_objective(taken, objective))


def test_latest_pass_alone_counts_outside_of_record_ksvd():
    layer = make_layer("sampled")
    first, second = make_inputs(seed=0), make_inputs(seed=1)
    second.run(layer)
    expected = loss_of(layer, "released")
    first.run(layer), second.run(layer)
    assert_near(loss_of(layer, "released"), expected)
    with record_ksvd(layer):
        first.run(layer), second.run(layer)
    second.run(layer)  # the first pass after the block starts afresh
    assert_near(loss_of(layer, "released"), expected)


def test_passes_before_the_block_are_not_in_it():
    layer, first, second = make_layer("dual"), make_inputs(seed=0), make_inputs(seed=1)
    second.run(layer)
    expected = loss_of(layer, "released")
    first.run(layer)
    with record_ksvd(layer):
        second.run(layer)
        assert_near(loss_of(layer, "released"), expected)


def test_passes_are_kept_after_the_block():
    layer, inputs = make_layer("dual"), make_inputs()
    with record_ksvd(layer):
        for half in halves(inputs):
            half.run(layer)
        inside = loss_of(layer, "released")
    assert_near(loss_of(layer, "released"), inside)


def test_leaving_an_inner_block_does_not_end_the_outer_one():
    model, inputs = Stack("static"), make_inputs()
    with record_ksvd(model):
        with record_ksvd(model.second):
            pass
        for half in halves(inputs):
            half.run(model)
        assert len(model.first.passes.runs) == len(model.second.passes.runs) == 2
    inputs.run(model)
    assert len(model.first.passes.runs) == len(model.second.passes.runs) == 1


def test_inner_block_keeps_the_passes_of_the_outer_one():
    model, inputs = Stack("static"), make_inputs()
    first, second = halves(inputs)
    with record_ksvd(model):
        first.run(model)
        with record_ksvd(model.second):
            second.run(model)
        assert len(model.first.passes.runs) == len(model.second.passes.runs) == 2


def test_block_ends_after_an_exception():
    layer, inputs = make_layer("dual"), make_inputs()
    with pytest.raises(KeyError), record_ksvd(layer):
        inputs.run(layer)
        raise KeyError
    inputs.run(layer), inputs.run(layer)
    assert len(layer.passes.runs) == 1


@pytest.mark.parametrize("recording", [True, False])
def test_eval_passes_are_not_recorded(recording):
    layer, inputs, other = make_layer("sampled"), make_inputs(), make_inputs(seed=1)
    inputs.run(layer)
    expected = loss_of(layer, "released")
    with record_ksvd(layer) if recording else nullcontext():
        inputs.run(layer)
        layer.eval()
        other.run(layer)
        assert_near(loss_of(layer, "released"), expected)


def test_prefill_and_step_are_not_recorded():
    layer, inputs, other = make_layer("static causal"), make_inputs(), make_inputs(seed=1)
    inputs.run(layer)
    expected = loss_of(layer, "released")
    _, state = layer.prefill(other.x)
    layer.step(other.x[:, 0], state)
    assert_near(loss_of(layer, "released"), expected)


@objectives
@kinds
def test_accumulated_gradients_are_the_mean_over_micro_batches(kind, objective):
    model, inputs = Stack(kind), make_inputs(kind)
    parts = list(halves(inputs))
    expected = []
    for part in parts:
        part.run(model)
        expected.append(gradients(loss_of(model, objective), model))
    for part in parts:
        task = part.run(model).mean() * 0.0
        ((task + loss_of(model, objective)) / len(parts)).backward()
    accumulated = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_near(
        accumulated, {name: (expected[0][name] + expected[1][name]) / 2 for name in accumulated}
    )


def test_copies_start_without_passes():
    layer, inputs = make_layer("sampled"), make_inputs()
    with record_ksvd(layer):
        inputs.run(layer)
        loss = loss_of(layer, "released")
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            with pytest.raises(RuntimeError, match="training mode"):
                loss_of(twin, "released")
            inputs.run(twin), inputs.run(twin)
            assert len(twin.passes.runs) == 1
    assert_near(loss_of(layer, "released"), loss)
    torch.testing.assert_close(twin.state_dict(), layer.state_dict())


def in_threads(*jobs):
    """Run the jobs at once and raise what one of them raised."""
    errors = []

    def run(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, on the first pass
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_the_objective_is_of_the_passes_of_its_own_thread(form, recording):
    layer = make_layer("sampled")
    torch.compiler.reset()
    forward = layer if form == "eager" else torch.compile(layer, fullgraph=True, backend="eager")
    together = threading.Barrier(4)

    def job(seed):
        inputs = make_inputs(seed=seed)
        other = copy.deepcopy(layer)
        expected = []
        for number in (1, 2):
            with record_ksvd(other):
                for _ in range(number if recording else 1):
                    inputs.run(other)
            expected.append(loss_of(other, "zero"))
        together.wait()
        for repeat in range(20):
            number = 1 + repeat % 2
            with record_ksvd(layer) if recording else nullcontext():
                for _ in range(number):
                    inputs.run(forward)
                assert len(layer.passes.runs) == (number if recording else 1)
            assert_near(loss_of(layer, "zero"), expected[number - 1])

    if form == "compiled":  # threads do not compile at once
        with record_ksvd(layer):
            make_inputs().run(forward), make_inputs().run(forward)
        make_inputs().run(forward), make_inputs().run(forward)
    in_threads(*(lambda seed=seed: job(seed) for seed in range(4)))


def test_a_thread_that_ran_no_layer_has_no_objective():
    layer, inputs = make_layer("sampled"), make_inputs()
    inputs.run(layer)

    def job():
        with pytest.raises(RuntimeError, match="in this thread"):
            loss_of(layer, "released")

    in_threads(job)
    assert len(layer.passes.runs) == 1


class Behind(torch.autograd.Function):
    """A node of the graph that owns an object, which lives as long as the graph."""

    @staticmethod
    def forward(ctx, x, owned):
        ctx.owned = owned
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        return d_x, None


class Owned:
    pass


@objectives
@kinds
def test_a_backward_pass_lets_go_of_the_graph_that_it_used_up(kind, objective):
    model, inputs, owned = Stack(kind), make_inputs(kind), Owned()
    alive = weakref.ref(owned)
    y = inputs._replace(x=Behind.apply(inputs.x, owned)).run(model)
    del owned
    loss = loss_of(model, objective)
    value = loss.detach()
    (y.mean() + loss).backward(retain_graph=True)
    (y.mean() + loss_of(model, objective)).backward()
    del y, loss
    gc.collect()
    assert alive() is None
    again = loss_of(model, objective)
    assert_near(again.detach(), value)
    with pytest.raises(RuntimeError, match="used up the graph"):
        again.backward()
    with torch.no_grad():
        assert_near(loss_of(model, objective), value)
    inputs.run(model)
    loss_of(model, objective).backward()


def test_a_newer_pass_is_not_let_go_by_the_backward_pass_of_an_older_one():
    layer, first, second = make_layer("sampled"), make_inputs(seed=0), make_inputs(seed=1)
    first.run(layer)
    loss = loss_of(layer, "released")
    second.run(layer)
    loss.backward()
    loss_of(layer, "released").backward()
