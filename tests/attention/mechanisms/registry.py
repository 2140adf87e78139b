"""The mechanisms of the registry, small, and the contract that each of them keeps."""

from primal_attention import ATTENTIONS, build_attention, ksvd_loss
from primal_attention.testing import Status, check_attention

NAMES = [
    *(
        "primal",
        "primal_time",
        "softmax",
        "softmax_bn",
        "softmax_sh",
        "softmax_bn_sh",
        "linear",
        "linear_bn",
    ),
    *("performer", "linformer", "nystrom", "reformer", "longformer", "yoso", "cosformer"),
    *("soft", "flow", "sparse"),
]
EXEMPT = {"cosformer": ["autocast"], "yoso": ["gradients", "gradient graphs"]}
CAUSAL = {"primal": {"weights": "static"}}
SCALES = {name: {"scales": [1, 1, 4, 4]} for name in NAMES if name.endswith("_sh")}  # two are quick


def build(name, causal, **options):
    given = SCALES.get(name, {}) | (CAUSAL.get(name, {}) if causal else {})
    return build_attention(name, 32, 4, causal=causal, **given, **options)


def assert_keeps_the_contract(name, *, causal):
    objective = ksvd_loss if name.startswith("primal") else None
    report = check_attention(lambda: build(name, causal), causal=causal, objective=objective)
    exempt = [result.name for result in report.results if result.status is Status.EXEMPT]
    assert exempt == EXEMPT.get(name, [])
    about = ATTENTIONS[name].mechanism
    passed = {
        "causality": causal,
        "decoding": causal and bool(about.decode),
        "cross-attention": about.cross and not causal,
    }
    assert {clause: report[clause].status is Status.PASSED for clause in passed} == passed
    assert "any sequence length" in report["export"].detail
