"""The attention contract: promises that any attention module can be tested against."""

from primal_attention.testing.contract import check_attention
from primal_attention.testing.report import ClauseResult, ContractError, Report, Status

__all__ = ["ClauseResult", "ContractError", "Report", "Status", "check_attention"]
