"""What a check finds, and how it is told.

- `fail`: a node would not work, or not for long. `warn`: it works, with a loss that is named. `skip`: there was nothing
  to check with. A finding that is not `ok` says what to do next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckState(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    check: str
    state: CheckState
    said: str
    """The root cause, or what is well, in a sentence."""
    evidence: str = ""
    """What was measured or read."""
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, said: str, evidence: str = "") -> CheckResult:
    return CheckResult(check, CheckState.OK, said, evidence)


def warn(check: str, said: str, evidence: str, next_step: str) -> CheckResult:
    return CheckResult(check, CheckState.WARN, said, evidence, next_step)


def fail(check: str, said: str, evidence: str, next_step: str) -> CheckResult:
    return CheckResult(check, CheckState.FAIL, said, evidence, next_step)


def skip(check: str, said: str, next_step: str = "") -> CheckResult:
    return CheckResult(check, CheckState.SKIP, said, "", next_step)


def failed(findings: Iterable[CheckResult]) -> bool:
    """Whether anything would keep a node from working."""
    return any(finding.state is CheckState.FAIL for finding in findings)


def lines(finding: CheckResult) -> Iterator[str]:
    """A finding as people read it."""
    yield f"{finding.state.value:<4}  {finding.check:<11} {finding.said}"
    if finding.evidence:
        yield f"                  {finding.evidence}"
    if finding.next_step:
        yield f"                  → {finding.next_step}"


def summary(findings: list[CheckResult]) -> str:
    """The last line."""
    counts = {state: sum(1 for one in findings if one.state is state) for state in CheckState}
    said = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    verdict = "fix the failed checks before you join" if failed(findings) else "a node can work here"
    return f"{said}: {verdict}."
