"""The common tests of transformers on PrimalFormer, run by ``transformers_tests.py``."""

import unittest

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import (
    ModelTesterMixin,
    floats_tensor,
    ids_tensor,
    random_attention_mask,
)

from primal_attention import models

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class TextTester:
    """Small text models and their inputs."""

    batch_size, seq_length, num_labels, is_training = 5, 7, 3, True
    hidden_size, num_hidden_layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]

    def get_config(self):
        return models.PrimalFormerConfig(
            vocab_size=99,
            intermediate_size=37,
            num_labels=self.num_labels,
            attention_options={"num_directions": 6},
            **SIZES,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        mask = random_attention_mask(shape)
        return self.get_config(), {"input_ids": ids_tensor(shape, 99), "attention_mask": mask}


class PictureTester:
    """Small models of pictures and their inputs."""

    batch_size, seq_length, num_labels, is_training = 5, 16, 3, True
    hidden_size, num_hidden_layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]

    def get_config(self):
        return models.PrimalFormerConfig(
            image_size=16,
            patch_size=4,
            num_labels=self.num_labels,
            attention_options={"num_directions": 6},
            **SIZES,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}


class Common(ModelTesterMixin):
    has_attentions = False
    test_resize_embeddings = True

    def test_config(self):
        ConfigTester(
            self, config_class=models.PrimalFormerConfig, hidden_size=32
        ).run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        if return_labels and model_class is models.PrimalFormerModel:
            self.skipTest("a base model has no loss; transformers knows its own by their names")
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        B, N = self.model_tester.batch_size, self.model_tester.seq_length
        if return_labels:
            name = model_class.__name__
            per_token = "LM" in name or "Token" in name
            inputs["labels"] = torch.zeros((B, N) if per_token else B, dtype=torch.long)
        return inputs


class PrimalFormerTextTest(Common, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (
        models.PrimalFormerModel,
        models.PrimalFormerForCausalLM,
        models.PrimalFormerForMaskedLM,
        models.PrimalFormerForSequenceClassification,
        models.PrimalFormerForTokenClassification,
    )
    all_generative_model_classes = (models.PrimalFormerForCausalLM,)

    def setUp(self):
        self.model_tester = TextTester()

    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        config, inputs = super().prepare_config_and_inputs_for_generate(batch_size)
        config.is_decoder = True
        return config, inputs


class PrimalFormerPictureTest(Common, unittest.TestCase):
    all_model_classes = (models.PrimalFormerForImageClassification,)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = PictureTester()

    def test_model_get_set_embeddings(self):
        config, _ = self.model_tester.prepare_config_and_inputs_for_common()
        model = models.PrimalFormerForImageClassification(config)
        patches = torch.nn.Conv2d(3, 32, 4, stride=4)
        model.set_input_embeddings(patches)
        self.assertIs(model.get_input_embeddings(), patches)
