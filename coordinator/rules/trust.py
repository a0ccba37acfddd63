"""Trust: how closely an owner is audited, by the findings of earlier audits: rates, windows, faults and sanctions.

| level | when | rate | escrow |
|---|---|---|---|
| `new` | fewer than `first_groups` validated | everything | posted as audited |
| `known` | then | `first_groups` / n, at least `floor` and the rate that the escrow requires | the window |
| `trusted` | from `trusted_groups` on | `trusted_floor`, at least the rate that the escrow requires | the window |
| `held` | after one hard fault, until `first_groups` more are validated | everything | nothing is posted unaudited |
| `banned` | after a second one, on another group | no more leases | void |

- Trust belongs to the owner, for whom many nodes may work. It is earned by whole groups: a part of a group that another
  node finished is audited at the owner's rate and may be a fault, but counts for nothing else, since it may be one
  token.
- n counts accepted groups, but at most `LEAD` times the validated ones: many forgeries cannot lower their own rate, and
  a slow auditor makes no owner a newcomer.
- A hard fault sets all counts to 0. It expires after `trusted_groups` validated groups: an honest node with one chance
  fault in ten thousand audits must not be banned in the end.
- A soft fault sets n back to where one group in `LEAD` is audited; it takes no money.
- The window makes cheating worthless: an owner that cheats once gains one payment with chance 1 − q and loses the
  window with chance q, so (1 − q) / q payments are held back, times `escrow_factor`.
- The rate covers the rest: a claim worth a, with V in window and pledge, is drawn with a chance of at least a / (a +
  V), whatever was earned before. So a long claim, a raised price, or a rate that has just fallen makes no forgery worth
  while. An owner with nothing to lose is audited on all claims; that ends with the pledge, a group that was found right
  and is not paid yet (`coordinator.transactions.escrow`).
- While auditors are behind, rates of known owners fall by `ease`, down to `trusted_floor` and to the rate that the
  escrow requires. Their window grows accordingly: it is that of the lowest rate at which any unpaid claim was drawn,
  also after the rates have risen again. Owners that are new or held are audited on all claims, whatever the backlog.
- Pure: standings in, standings out.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from coordinator.config import AuditSection
from ledger.drawing import ALL_PPM

Level = Literal["new", "known", "trusted", "held", "banned"]
Finding = Literal["pass", "soft", "hard", "pardon"]
"""The finding of an audit of one claim; pardon: the audit was not possible, by no fault of the node's."""

FAULTS_TO_BAN = 2
"""Independent faults that lead to a ban: on groups with unrelated seeds; a part and its whole share a seed."""

LEAD = 4
"""The most accepted groups that count, per validated group."""


@dataclass(frozen=True)
class OwnerStanding:
    """The record of one owner."""

    claims: int = 0
    """Groups accepted since the last hard fault."""
    groups: int = 0
    """Groups validated since then."""
    soft: int = 0
    hard: int = 0
    """Hard faults that have not expired."""


def level(standing: OwnerStanding, audit: AuditSection) -> Level:
    if standing.hard >= FAULTS_TO_BAN:
        return "banned"
    if standing.groups < audit.first_groups:
        return "held" if standing.hard else "new"
    return "trusted" if standing.groups >= audit.trusted_groups else "known"


def rate_ppm(
    standing: OwnerStanding, audit: AuditSection, *, worth_micros: int = 0, held_micros: int = 0, ease: float = 0.0
) -> int:
    """Return the audit rate, per million, of a claim worth `worth_micros` while the escrow holds `held_micros`."""
    rate = _rate(standing, audit)
    if 0 < rate < 1 and ease and audit.trusted_floor:
        rate -= ease * max(0.0, rate - audit.trusted_floor)
    if 0 < rate < 1 and worth_micros:
        worth = audit.escrow_factor * worth_micros
        rate = max(rate, worth / (worth + held_micros) if worth else 0.0)
    return math.ceil(ALL_PPM * rate)


def _rate(standing: OwnerStanding, audit: AuditSection) -> float:
    """Return the share that is audited whatever the escrow holds."""
    if level(standing, audit) in ("new", "held", "banned"):
        return 1.0
    floor = audit.trusted_floor if standing.groups >= audit.trusted_groups else audit.floor
    counted = min(standing.claims, LEAD * standing.groups)
    return min(1.0, max(floor, audit.first_groups / max(1, counted)))


def window(standing: OwnerStanding, audit: AuditSection, *, drawn_ppm: int = ALL_PPM) -> int:
    """Return how many unaudited groups stay unpaid, if some were drawn at `drawn_ppm`, which may be lower than usual.

    It is 0 where nothing is ever audited, since no fault could be found.
    """
    rate = min(rate_ppm(standing, audit), drawn_ppm)
    return math.ceil(audit.escrow_factor * (ALL_PPM - rate) / rate) if rate else 0


def validated(standing: OwnerStanding, audit: AuditSection, groups: int = 1) -> OwnerStanding:
    """Return the standing after `groups` more groups were found right, or their window was."""
    count = standing.groups + groups
    return replace(standing, groups=count, hard=0 if count >= audit.trusted_groups else standing.hard)


def lifted(standing: OwnerStanding, before: OwnerStanding, *, counts: bool) -> OwnerStanding:
    """Return the standing after the last hard fault was overturned; `counts` is False if it counts no more."""
    hard = standing.hard - 1 if counts else standing.hard
    return replace(standing, claims=standing.claims + before.claims, groups=standing.groups + before.groups, hard=hard)


def exact_class_after(before: str, finding: Finding, claimed: str, *, auditors: str) -> str:
    """Return the exact class in which a node's work counts as proven, after a verdict on a claim of class `claimed`.

    `auditors` is the exact class of the auditor. Only its own auditor compares bits: the pass of another one proves
    nothing, and a failure of any kind ends the proof, a soft one included, since most forged bits fail softly.
    """
    if finding == "pass":
        return claimed if claimed == auditors else before
    return before if finding == "pardon" else ""


def after_verdict(
    standing: OwnerStanding, finding: Finding, audit: AuditSection, groups: int = 1, *, again: bool = False
) -> OwnerStanding:
    """Return the standing after a verdict on a claim for `groups` groups; `again` if the same group has a fault."""
    match finding:
        case "pass":
            return validated(standing, audit, groups)
        case "soft":
            return replace(standing, groups=min(standing.groups, audit.first_groups), soft=standing.soft + 1)
        case "hard":
            hard = max(1, standing.hard) if again else standing.hard + 1
            return replace(standing, claims=0, groups=0, hard=hard)
        case "pardon":
            return standing
