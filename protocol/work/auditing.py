"""What auditors and the coordinator say to each other, and what a node is told of a verdict.

- An auditor is a client like the learner, with the operator's credential; there may be several.
- Cases are taken for a while; verdicts are evidence, kept for the node concerned.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol import limits
from protocol.ids import Hex32, Hex64
from protocol.policy.manifest import Sampler
from protocol.wire.message import Message
from protocol.work.appeal import Standing
from protocol.work.lease import Numerics

Found = Literal["pass", "soft", "hard", "pardon", "held"]
"""What an audit found; held: no verdict yet, since nothing was measured on this policy that the class is judged by."""

Fragments = Annotated[tuple[bytes, ...], Field(max_length=limits.FRAGMENTS_MAX)]
"""The envelopes of a claim to a part of a group, in their order; none beside a rollout."""


class TakeCases(Message):
    """An auditor has time for so many cases."""

    auditor: str = Field(min_length=1, max_length=64)
    """The same name after a restart, another for another auditor."""
    at_most: int = Field(ge=1, le=limits.AUDIT_CASES_MAX)
    classes: tuple[Numerics, ...] = Field((), max_length=limits.CLASSES_MAX)
    """Classes with tolerances of this round's policy: claims that were held for them are judged now."""


class HoldCases(Message):
    """An auditor is still at work on what it has taken."""

    auditor: str = Field(min_length=1, max_length=64)
    """As it took them."""


class AuditCase(Message):
    """One claim to look at: the lease as it was sent, and what the node signed."""

    claim_id: Hex64
    lease: bytes
    rollout: bytes
    """Empty if another finished the group."""
    fragments: Fragments = ()
    is_probe: bool = False
    """True for a node of the operator's own, on which its class is calibrated."""


class CaseFile(Message):
    """What a case folder holds beside tolerances and policies: all that a replay needs of one claim."""

    round_id: Hex64
    lease: bytes
    rollout: bytes
    """The envelope that the node signed; empty if another finished the group."""
    fragments: Fragments = ()
    sampler: Sampler


class Cases(Message):
    """Cases of one version; none if nothing waits."""

    version: int
    cases: tuple[AuditCase, ...]
    done: bool
    """The round has ended, and nothing will ever wait again."""


class Judged(Message):
    """What was found, with the whole report as JSON."""

    claim_id: Hex64
    finding: Found
    validator: str = Field(max_length=40)
    report: bytes = Field(max_length=limits.AUDIT_REPORT_MAX_BYTES)
    waits_for: Numerics = ""
    """The class that is to be calibrated first, of a held claim."""


class Verdicts(Message):
    """What an auditor brings back."""

    verdicts: tuple[Judged, ...] = Field(min_length=1, max_length=limits.AUDIT_CASES_MAX)
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Seconds that their replay took."""
    threads: int = Field(0, ge=0)
    """Threads of that replay; 0 if that is not said."""


class Why(Message):
    """A node asks what became of a lease or claim of its own; of its last ones, if it names none."""

    about: Hex32 | Hex64 | Literal[""] = ""


class Explanation(Message):
    """What became of one lease, and by what evidence."""

    lease_id: Hex32
    claim_id: str
    """Empty if nothing was accepted."""
    state: str
    """Of the lease; and of an accepted claim: pending, posted or voided."""
    code: str
    """Why it was rejected or voided; empty if it was not."""
    said: str
    """The same in words."""
    finding: str
    """Of its audit: pass, soft, hard, pardon, held; waiting, also while it is secret whether it was drawn; or empty."""
    appeal: Standing
    """Whether what took it may be appealed against, or how that appeal stands."""
    ruling: str
    """Why that was ruled so."""
    report: bytes
    """The evidence as JSON; empty if there is none."""
    lease: bytes
    """As it was sent; this and what follows only where one lease was named."""
    rollout: bytes
    """As it was signed."""
    fragments: Fragments = ()


class Explanations(Message):
    """The answer: those that were asked about, the newest first."""

    tolerance: str = Field(max_length=100, pattern=r"^[^\x00]*$")
    """The class that this round judges by; that of the lease, where one was named that has its own."""
    tolerances: bytes
    """The file of all classes, where one lease was named."""
    explanations: tuple[Explanation, ...] = Field(max_length=limits.EXPLANATIONS_MAX)
