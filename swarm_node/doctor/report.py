"""Result of a check, and its text.

- `fail`: a node would not work, or not for long. `warn`: it works, with the stated loss. `skip`: the check was not
  possible. A finding that is not `ok` has a next step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

CHECK_CHARS = 12
"""Width of the column of names, for the longest: `engine torch`."""


class CheckState(StrEnum):
    """Severity of a result."""

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
    """The cause, or what works, in a sentence."""
    evidence: str = ""
    """The measured or read values."""
    next_step: str = ""
    url: str = ""
    """Address of the round that was checked; empty for a check of the machine."""

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
    """Return True if any check has failed."""
    return any(finding.state is CheckState.FAIL for finding in findings)


def lines(finding: CheckResult) -> Iterator[str]:
    """Yield a finding as lines of text."""
    start = f"{finding.state.value:<4}  {finding.check:<{CHECK_CHARS}} "
    yield start + finding.said
    if finding.evidence:
        yield " " * len(start) + finding.evidence
    if finding.next_step:
        yield f"{' ' * len(start)}→ {finding.next_step}"


def summary(findings: list[CheckResult]) -> str:
    """Return the summary line."""
    counts = {state: sum(1 for finding in findings if finding.state is state) for state in CheckState}
    said = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    verdict = "fix the failed checks before you join" if failed(findings) else "a node can work here"
    return f"{said}: {verdict}."
