"""An auditor's report as this node is told it: the coordinator's word, and so perhaps no report at all.

- What is printed or gone by is read into a schema first. Else a report that is none would end `why` before it could say
  what the log says.
- What else a report has, as that of a later auditor may, is kept for scripts.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol import limits

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Reported(BaseModel):
    """What a report is made of; unlike a message it may have more fields."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


class ReportedPosition(Reported):
    """One token: what was claimed of it, and what the audit found."""

    sample: Count
    position: Count
    claimed: Count
    dictated: Count
    margin: float
    claimed_logprob: float
    logprob: float


class ReportedFinding(Reported):
    """A rule that was broken."""

    rule: str
    outcome: str
    expected: str
    observed: str
    positions: tuple[ReportedPosition, ...]


class ReportedFit(Reported):
    """A version beside the claimed one that the audit compared with."""

    version: Count


class ReportedAudit(Reported):
    """What an audit of one claim found, or why it found nothing; empty where there was none."""

    findings: tuple[ReportedFinding, ...] = ()
    fits: tuple[ReportedFit, ...] | None = None
    validator: str = ""
    tolerance: str = ""
    calibration: Count = 0
    error: str = ""


def read(report: bytes) -> ReportedAudit | None:
    """What a report says; None where it is none that an auditor writes."""
    if len(report) > limits.AUDIT_REPORT_MAX_BYTES:
        return None
    try:
        return ReportedAudit.model_validate_json(report or b"{}")
    except ValidationError:
        return None
