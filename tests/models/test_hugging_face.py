"""PrimalFormer as models of transformers: saved, loaded, trained, generating."""

import copy

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from primal_attention import ksvd_loss
from primal_attention.models import PrimalFormerConfig, PrimalFormerForSequenceClassification

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["[PAD]", "[UNK]", "[MASK]", "a", "kernel", "is", "not", "matrix"]
TEXT = {**SIZES, "vocab_size": len(WORDS)}
DECODERS = [None, "primalformer", "primal_time_plus", "softmax", "linear"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(1, len(WORDS), (3, 9))


@pytest.mark.parametrize(
    ("auto", "shape"),
    [
        (AutoModelForCausalLM, (3, 9, 8)),
        (AutoModelForMaskedLM, (3, 9, 8)),
        (AutoModelForSequenceClassification, (3, 4)),
        (AutoModelForTokenClassification, (3, 9, 4)),
    ],
)
def test_auto_classes_build_save_and_load(auto, shape, ids, tmp_path):
    model = auto.from_config(PrimalFormerConfig(**TEXT, num_labels=4)).eval()
    logits = model(ids).logits
    assert logits.shape == shape
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(again(ids).logits, logits)
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "PrimalFormerModel"


def test_pictures(tmp_path):
    config = PrimalFormerConfig(image_size=8, patch_size=4, position_type="learned", **SIZES)
    model = AutoModelForImageClassification.from_config(config)
    out = model(torch.randn(3, 3, 8, 8), labels=torch.tensor([0, 1, 1]))
    out.loss.backward()
    assert out.logits.shape == (3, 2)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_padding_changes_nothing(ids):
    model = PrimalFormerForSequenceClassification(PrimalFormerConfig(**TEXT)).eval()
    padded = torch.cat([ids, torch.full((3, 4), 5)], 1)
    mask = torch.arange(13) < 9
    torch.testing.assert_close(
        model(padded, attention_mask=mask.expand(3, -1).long()).logits, model(ids).logits
    )


@pytest.mark.parametrize("name", DECODERS)
def test_generation_continues_the_full_pass(name, ids):
    model = AutoModelForCausalLM.from_config(PrimalFormerConfig(**TEXT, model=name)).eval()
    expected = ids
    for _ in range(5):
        logits = model(expected, use_cache=False).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    options = {"max_new_tokens": 5, "do_sample": False}
    real = torch.ones_like(ids)
    assert torch.equal(model.generate(ids, attention_mask=real, **options), expected)
    left = torch.cat([torch.zeros(3, 2, dtype=torch.long), ids], 1)
    mask = (torch.arange(11) >= 2).long().expand(3, -1)
    assert torch.equal(model.generate(left, attention_mask=mask, **options)[:, 2:], expected)


def test_the_state_does_not_grow(ids):
    model = AutoModelForCausalLM.from_config(PrimalFormerConfig(**TEXT)).eval()
    sizes = []
    for tokens in (ids, ids.repeat(1, 5)):
        layers = model(tokens, use_cache=True).past_key_values.layers
        sizes.append([tensor.numel() for layer in layers for tensor in layer.read(None)])
    assert sizes[0] == sizes[1]


def test_the_objective_is_in_the_loss_of_training(ids):
    labels = torch.tensor([0, 1, 0])
    config = PrimalFormerConfig(**TEXT, ksvd_eta=0.5, hidden_dropout_prob=0.0)
    model = PrimalFormerForSequenceClassification(config)
    loss = model(ids, labels=labels).loss
    task = model.eval()(ids, labels=labels).loss
    torch.testing.assert_close(loss - task, 0.5 * ksvd_loss(model.train()))


def test_checkpointing_changes_no_gradient(ids):
    config = PrimalFormerConfig(**TEXT, ksvd_eta=0.5, hidden_dropout_prob=0.0)
    one = PrimalFormerForSequenceClassification(config)
    other = copy.deepcopy(one)
    other.gradient_checkpointing_enable()
    for model in (one, other):
        model(ids, labels=torch.tensor([0, 1, 0])).loss.backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_trainer_and_pipeline(tmp_path):
    words = tokenizer()
    model = PrimalFormerForSequenceClassification(PrimalFormerConfig(**TEXT, ksvd_eta=0.1))
    texts = ["a kernel is a kernel", "a matrix is not a kernel"] * 4
    data = [{**words(text), "labels": i % 2} for i, text in enumerate(texts)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=words)
    trainer.train()
    assert "loss" in trainer.state.log_history[0]
    classify = pipeline("text-classification", model=model.eval(), tokenizer=words, device="cpu")
    assert {each["label"] for each in classify(["a kernel", "not a matrix"])} <= {
        "LABEL_0",
        "LABEL_1",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "primall"}, "model must be one of"),
        ({"position_type": "rotary"}, "position_type must be one of"),
        ({"image_size": 15, "patch_size": 4}, "multiple of patch_size=4"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrimalFormerConfig(**options)


def test_exactly_one_input(ids):
    model = AutoModel.from_config(PrimalFormerConfig(**TEXT))
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        model(ids, inputs_embeds=torch.randn(3, 9, 24))


def test_learned_positions_have_an_end(ids):
    config = PrimalFormerConfig(**TEXT, position_type="learned", max_position_embeddings=8)
    with pytest.raises(ValueError, match="max_position_embeddings=8"):
        AutoModel.from_config(config)(ids)
