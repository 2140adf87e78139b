"""The causal forms of the mechanisms of the registry."""

import pytest

from primal_attention import ATTENTIONS

from .registry import NAMES, assert_keeps_the_contract

CAUSAL = [name for name in NAMES if ATTENTIONS[name].mechanism.causal]


@pytest.mark.parametrize("name", CAUSAL)
def test_contract(name):
    assert_keeps_the_contract(name, causal=True)
