"""`check_attention`: run every clause of the attention contract against a module."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from primal_attention.testing.clauses import CLAUSES, Clause
from primal_attention.testing.report import (
    ClauseResult,
    ContractError,
    Findings,
    NotApplicable,
    Report,
    Status,
)
from primal_attention.testing.subject import Subject, isolated

_LONGEST_TEXT = 160


def check_attention(
    layer_or_factory: nn.Module | Callable[[], nn.Module],
    *,
    causal: bool = False,
    dim: int | None = None,
    objective: Callable[[nn.Module], Tensor] | None = None,
) -> Report:
    """Hold an attention module to the contract of this library.

    The module maps `[B, N, D]` to `[B, N, D]` by
    `forward(x, context=None, *, token_mask=None, context_mask=None)`, where the masks are bool
    `[B, N]` with True at real tokens. Only copies are run; the caller's module and random numbers
    stay as they are, the caches of `torch.compile` are emptied.

    A module may opt out of clauses by the attribute `contract_exemptions`, a dict from the name of
    the clause to the reason, which the report shows.

    Args:
        layer_or_factory: A module, or a function without arguments that builds one. With a
            function the state dict is also loaded into a newly built module.
        causal: Whether the module claims to be causal; adds the clauses on causality and decoding.
        dim: The number of channels of a token, where neither an attribute `dim` of the module nor
            its first `nn.Linear` tells it.
        objective: A function of the module after a forward pass in training mode, such as
            `primal_attention.ksvd_loss`: a term of the loss that is made of what the module kept
            of that pass. With it, the clause on threads looks at training too.

    Returns:
        The report, in which no clause failed.

    Raises:
        ContractError: If a clause is broken; the message is the whole report.
        ValueError: If `dim` is needed, the module cannot be copied, or an exemption names no
            clause.
        TypeError: If `layer_or_factory` is neither a module nor builds one.
    """
    with isolated():
        subject = Subject(layer_or_factory, causal=causal, dim=dim, objective=objective)
        exemptions = _checked(subject.exemptions)
        results = tuple(
            _examine(name, clause, subject, exemptions) for name, clause in CLAUSES.items()
        )
    report = Report(subject.name, results)
    if not report.passed:
        raise ContractError(report)
    return report


def _checked(exemptions: Mapping[str, str]) -> Mapping[str, str]:
    for name, reason in exemptions.items():
        if name not in CLAUSES:
            raise ValueError(
                f"contract_exemptions names the clause {name!r}, which does not exist; choose from "
                f"{', '.join(CLAUSES)}"
            )
        if not (isinstance(reason, str) and reason.strip()):
            raise ValueError(
                f"contract_exemptions[{name!r}] must state a reason as text, got {reason!r}"
            )
    return exemptions


def _examine(
    name: str, clause: Clause, subject: Subject, exemptions: Mapping[str, str]
) -> ClauseResult:
    if name in exemptions:
        status, text = Status.EXEMPT, exemptions[name]
    else:
        try:
            findings = clause(subject)
        except NotApplicable as reason:
            status, text = Status.NOT_APPLICABLE, str(reason)
        except Exception as error:
            status, text = Status.FAILED, f"{type(error).__name__}: {error}"
        else:
            return _result(name, findings)
    return ClauseResult(name, status, None, None, at_least=False, detail=_first_line(text))


def _result(name: str, findings: Findings) -> ClauseResult:
    worst, broken = findings.worst(), findings.broken()
    status = Status.FAILED if broken else Status.PASSED
    detail = f"broken by {worst.what}" if broken else findings.detail
    if len(broken) > 1:
        detail += f" and {len(broken) - 1} more of {len(findings.observations)} observations"
    return ClauseResult(name, status, worst.value, worst.bound, worst.at_least, detail)


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}..."
