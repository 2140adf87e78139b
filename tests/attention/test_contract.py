"""The layer keeps the public contract in the forms that the registry does not build."""

import pytest

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.testing import Status, check_attention

FORMS = {
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
    "sampled, exponential": {"feature_map": "exponential"},
    "sampled, e-scores without bias": {"scores": "e", "bias": False},
    "static": {"weights": "static"},
}


@pytest.mark.parametrize("form", FORMS)
def test_contract(form):
    options = FORMS[form]
    causal = options.get("causal", False)
    report = check_attention(
        lambda: PrimalAttention(15, 3, 7, samples_per_direction=2, **options),
        causal=causal,
        objective=ksvd_loss,
    )
    assert report.passed
    assert not hasattr(PrimalAttention, "contract_exemptions")
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    without_context = {"cross-attention"} if causal or options.get("weights") == "static" else set()
    without_causality = set() if causal else {"causality", "decoding"}
    assert skipped == without_context | without_causality, str(report)
