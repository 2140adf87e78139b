"""The objective in the loops of others."""

import sys

import pytest
import torch

from primal_attention import ksvd_loss, patch
from primal_attention.patching import trainer_callback

from .families import TEXT, VOCABULARY, bert, gpt2

QUIET = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    return patch(BertForSequenceClassification(BertConfig(**TEXT)), num_directions=5)


def lambdas(model):
    (raw,) = [p for name, p in model.named_parameters() if name.endswith("raw_lambda")]
    return raw.detach().clone()


def hear():
    """A callback that keeps what is logged as the objective."""
    from transformers import TrainerCallback

    class Heard(TrainerCallback):
        def __init__(self):
            self.values = []

        def on_log(self, args, state, control, logs=None, **others):
            self.values += [logs["ksvd"]] if "ksvd" in logs else []

    return Heard()


def fit(model, folder, eta, data, *callbacks, **options):
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 2, "per_device_train_batch_size": 2} | options
    arguments = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **options
    )
    callbacks = [*([] if eta is None else [trainer_callback(eta)]), *callbacks]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return trainer


def labelled(number=8):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (number, 7), generator=generator)
    return [{"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(tokens)]


def sentences(number=8):
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in labelled(number)]


def test_the_trainer_learns_lambda_with_the_callback_alone(tmp_path):
    without, with_it = classifier(), classifier()
    start = lambdas(without)
    fit(without, tmp_path, None, labelled())
    assert torch.equal(lambdas(without), start)
    heard = hear()
    trainer = fit(with_it, tmp_path, 0.1, labelled(), heard, logging_steps=1)
    assert not torch.equal(lambdas(with_it), start)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert [entry["ksvd"] for entry in logged] == heard.values
    assert all(value > 0 for value in heard.values)
    # evaluation, and training after it, are as they were
    loss = trainer.evaluate(labelled())["eval_loss"]
    batch = {k: torch.stack([row[k] for row in labelled()]) for k in ("input_ids", "labels")}
    with torch.no_grad():
        assert with_it.eval()(**batch).loss.item() == pytest.approx(loss, rel=1e-5)
        assert len(with_it._forward_hooks) == 0


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accumulated_steps_weigh_the_objective_once(accumulated, tmp_path):
    """Language models sum the losses of the parts of a step; the objective is averaged."""
    torch.manual_seed(3)
    model = patch(gpt2(**QUIET), num_directions=5)
    start = lambdas(model)
    rate, eta = 0.1, 0.7
    fit(
        model,
        tmp_path,
        eta,
        sentences(),
        max_steps=1,
        per_device_train_batch_size=8 // accumulated,
        gradient_accumulation_steps=accumulated,
        optim="sgd",
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    torch.manual_seed(3)
    alike = patch(gpt2(**QUIET), num_directions=5).train()
    tokens = torch.stack([row["input_ids"] for row in sentences()])
    gradients = []
    for part in tokens.chunk(accumulated):
        alike.zero_grad()
        alike(part)
        (eta * ksvd_loss(alike)).backward()
        (raw,) = [p for name, p in alike.named_parameters() if name.endswith("raw_lambda")]
        gradients.append(raw.grad.clone())
    if accumulated == 1:  # else the parts are shuffled, and only their size is known
        assert torch.allclose(lambdas(model) - start, -rate * gradients[0], atol=1e-6)
    size = torch.stack(gradients).mean(0).norm()
    assert (lambdas(model) - start).norm() == pytest.approx(rate * size.item(), rel=0.3)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"trainer_callback needs .*primal-attention\[patch\]"):
        trainer_callback(0.1)


def test_a_trainer_with_another_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1"):
        fit(classifier(), tmp_path, 0.1, labelled(), label_smoothing_factor=0.1)


def test_a_model_without_a_loss_is_refused():
    model = patch(bert()).train()
    model.register_forward_hook(trainer_callback(0.1).add_to_loss, with_kwargs=True)
    with pytest.raises(ValueError, match="BertModel returned no loss"):
        model(torch.randint(3, VOCABULARY, (2, 7)))
