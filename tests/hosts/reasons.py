"""Why some of transformers' own tests cannot pass with patched models."""

from typing import NamedTuple


class Reason(NamedTuple):
    """What tests fail, by their names and messages, and why that is as it should be."""

    tests: str  # matches the whole name
    message: str  # is found in the message
    why: str


REASONS = (
    Reason(
        "test_custom_4d_attention_mask",
        "the mask is more than padding",
        "several continuations share one beginning in one row, by a mask: a mechanism without a "
        "matrix of scores has nothing to apply it to, and refuses",
    ),
    Reason(
        "test_model_outputs_equivalence",
        "meta",
        "numbers of attention weights are compared: a patched layer has none, only their shape",
    ),
    Reason(
        "test_retain_grad_hidden_states_attentions",
        "can't retain_grad on Tensor that has requires_grad=False",
        "a gradient of attention weights is asked for: a patched layer has no weights",
    ),
    Reason(
        "test_sdpa_can_dispatch_non_composite_models",
        "False is not true",
        "the implementation must be called sdpa, and is sdpa_padding where all layers are patched",
    ),
    Reason(
        "test_reverse_loading_mapping",
        "did not match any of the source",
        "each renaming of old checkpoints must find its weight, and where all layers are patched "
        "those of the values are gone: Primal has no values",
    ),
)
