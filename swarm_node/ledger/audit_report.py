"""Schema of an auditor's report, as received from the coordinator; it may be invalid.

- Every field that is printed or used is validated first. Otherwise an invalid report would end `why` before it could
  print the log's entry.
- Other fields, as in the report of a later auditor version, are kept for scripts.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol import limits

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Reported(BaseModel):
    """Base of the parts of a report; unlike a message it may have additional fields."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


class ReportedPosition(Reported):
    """A token position: the claimed values, and those of the audit."""

    sample: Count
    position: Count
    claimed: Count
    dictated: Count
    margin: float
    claimed_logprob: float
    logprob: float


class ReportedFinding(Reported):
    """A rule that the claim broke."""

    rule: str
    outcome: str
    expected: str
    observed: str
    positions: tuple[ReportedPosition, ...]


class ReportedFit(Reported):
    """Another version that the audit compared the claim with."""

    version: Count


class ReportedAudit(Reported):
    """Result of an audit of one claim, or the reason why it has no result; empty without an audit."""

    findings: tuple[ReportedFinding, ...] = ()
    fits: tuple[ReportedFit, ...] | None = None
    validator: str = ""
    tolerance: str = ""
    calibration: Count = 0
    error: str = ""
    note: str = ""


def read(report: bytes) -> ReportedAudit | None:
    """Parse a report; None if it is not a valid auditor's report."""
    if len(report) > limits.AUDIT_REPORT_MAX_BYTES:
        return None
    try:
        return ReportedAudit.model_validate_json(report or b"{}")
    except ValidationError:
        return None
