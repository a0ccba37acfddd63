"""Messages between auditors and the coordinator, and a node's view of a verdict.

- An auditor is a client like the learner, with the operator's credential; there may be several.
- It may repeat all calls. One that was held open for a while answers empty `Cases`.
- `take` reserves at most `limits.AUDIT_CASES_MAX` cases of one version for `audit.timeout_s`; its reply may be larger
  than other messages. `hold`, sent every third of that time, keeps them. A second `take` loses the cases in hand.
- A lost case is given out alone, and pardoned after the third time.
- Verdicts are evidence, kept for the node concerned; the first one on a claim counts.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.ids import Hex32, Hex64
from protocol.policy.manifest import Sampler
from protocol.wire.message import Message
from protocol.work.appeal import Standing
from protocol.work.lease import Numerics

Found = Literal["pass", "soft", "hard", "pardon", "held"]
"""The result of an audit; held: no verdict yet, because the class has no tolerances measured on this policy."""

Fragments = Annotated[tuple[bytes, ...], Field(max_length=limits.FRAGMENTS_MAX)]
"""The envelopes of a claim for a part of a group, in order; empty beside a rollout."""


class TakeCases(Message):
    """An auditor's request for at most `at_most` cases."""

    auditor: str = Field(min_length=1, max_length=64)
    """The auditor's name: the same after a restart, different for each auditor."""
    at_most: int = Field(ge=1, le=limits.AUDIT_CASES_MAX)
    classes: tuple[Numerics, ...] = Field((), max_length=limits.CLASSES_MAX)
    """Classes with tolerances for this round's policy, and the auditor's exact one, once it has met such a claim."""


class HoldCases(Message):
    """An auditor's report that it is still at work on its cases."""

    auditor: str = Field(min_length=1, max_length=64)
    """The name with which it requested them."""


class AuditCase(Message):
    """A claim to audit: the lease as it was sent, and the bytes that the node signed."""

    claim_id: Hex64
    lease: bytes
    rollout: bytes
    """Empty if another node finished the group."""
    fragments: Fragments = ()
    is_probe: bool = False
    """True for the operator's own node, on which its class is calibrated."""


class CaseFile(Message):
    """The claim in a case folder: all that a replay needs of it, beside tolerances and policies."""

    round_id: Hex64
    lease: bytes
    rollout: bytes
    """The envelope that the node signed; empty if another node finished the group."""
    fragments: Fragments = ()
    sampler: Sampler


class Cases(Message):
    """The answer to a request for cases, all of one version; empty if none waits."""

    version: int
    cases: tuple[AuditCase, ...]
    done: bool
    """True if the round has ended and no more cases will come."""


class Judged(Message):
    """The finding of an audit, with the whole report as JSON."""

    claim_id: Hex64
    finding: Found
    validator: str = Field(max_length=40)
    report: bytes = Field(max_length=limits.AUDIT_REPORT_MAX_BYTES)
    waits_for: Numerics = ""
    """The class that must be calibrated first, of a held claim."""


class Verdicts(Message):
    """An auditor's findings."""

    verdicts: tuple[Judged, ...] = Field(min_length=1, max_length=limits.AUDIT_CASES_MAX)
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Duration of their replay, in seconds."""
    threads: int = Field(0, ge=0)
    """Threads of that replay; 0 if unknown."""


class Why(Message):
    """A node's request for the outcome of its own lease or claim; of its last ones, if it names none."""

    about: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}){0,2}$")] = ""


class Explanation(Message):
    """The outcome of a lease, with the evidence."""

    lease_id: Hex32
    claim_id: str
    """Empty if no claim was accepted."""
    state: str
    """The state of the lease; or of an accepted claim: pending, posted or voided."""
    code: str
    """The code of its rejection or voiding; empty if there was none."""
    said: str
    """The reason in words."""
    finding: str
    """The finding of its audit: pass, soft, hard, pardon, held; waiting, also while the draw is secret; or empty."""
    appeal: Standing
    """The state of an appeal against the fault or ban that voided it."""
    ruling: str
    """The reason of the ruling."""
    report: bytes
    """The evidence as JSON; empty if there is none."""
    lease: bytes
    """The lease as it was sent; this and the fields below only if the request named one lease."""
    rollout: bytes
    """The rollout as it was signed."""
    fragments: Fragments = ()


class Explanations(Message):
    """The answer with the requested explanations, the newest first."""

    tolerance: str = Field(max_length=100, pattern=r"^[^\x00]*$")
    """The class whose tolerances apply: the named lease's own class, else the class of the round."""
    tolerances: bytes
    """The file with the tolerances of all classes, if the request named one lease."""
    explanations: tuple[Explanation, ...] = Field(max_length=limits.EXPLANATIONS_MAX)
