"""How closely an owner is looked at, by what audits found: rates, windows, faults and sanctions.

| level | when | rate | escrow |
|---|---|---|---|
| `new` | fewer than `first_groups` validated | everything | posted as audited |
| `known` | then | `first_groups` / n, at least `floor`, and what the escrow covers | the window |
| `trusted` | from `trusted_groups` on | `trusted_floor`, and what the escrow covers | the window |
| `held` | after one hard fault, until `first_groups` more are validated | everything | nothing is posted unaudited |
| `banned` | after a second one, on another group | no more leases | void |

- Trust belongs to the owner, under whom many nodes may work. It is earned by whole groups: a part of one, that another
  finished, is audited at the owner's rate and may be a fault, but counts for nothing else, since it may be one token.
- n counts accepted groups, but at most `LEAD` times the
  validated ones: a flood of forgeries cannot talk its rate down, and a slow auditor makes nobody a newcomer.
- A hard fault sets all counts to 0. `trusted_groups` validated groups later it is forgotten: an honest node that chance
  accuses once in ten thousand audits is not to be banned in the end.
- A soft fault sets n back to where one group in `LEAD` is audited; it takes no money.
- The window is what makes cheating worthless: whoever cheats once gains one payment with chance 1 − q and loses
  the window with chance q, so (1 − q) / q payments are held back, times `escrow_factor`.
- The rate covers what the escrow does not: a claim worth a, with V in window and pledge, is drawn with a chance of at
  least a / (a + V), whatever was earned before. So neither a long claim, nor a raised price, nor a rate that has just
  fallen is worth faking. Who has nothing to lose is audited whole; the pledge, a group that was found right and is not
  paid yet, is why that ends (`coordinator.transactions.escrow`).
- While auditors are behind, rates of owners who are known fall by `ease`, down to `trusted_floor` and to what the
  escrow covers. Their window grows by as much: it is that of the lowest rate at which anything unpaid was drawn, also
  after the rates have risen again. Who is new or held is audited whole, whatever waits.
- Pure: standings in, standings out.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ledger.drawing import ALL_PPM

Level = Literal["new", "known", "trusted", "held", "banned"]
Finding = Literal["pass", "soft", "hard", "pardon"]
"""What an audit of one claim found; pardon: nothing, by no fault of the node's."""

FAULTS_TO_BAN = 2
"""Independent: on claims to two groups, whose seeds have nothing in common; a part and its whole have one."""

LEAD = 4
"""How far accepted groups may run ahead of validated ones."""


@dataclass(frozen=True)
class TrustRules:
    """What the operator set."""

    first_groups: int = 10
    floor: float = 0.05
    trusted_groups: int = 1000
    trusted_floor: float = 0.02
    escrow_factor: float = 1.25


@dataclass(frozen=True)
class OwnerStanding:
    """What is known of one owner."""

    claims: int = 0
    """Accepted since the last hard fault."""
    groups: int = 0
    """Validated since then."""
    soft: int = 0
    hard: int = 0
    """Not forgotten yet."""


def level(standing: OwnerStanding, rules: TrustRules) -> Level:
    if standing.hard >= FAULTS_TO_BAN:
        return "banned"
    if standing.groups < rules.first_groups:
        return "held" if standing.hard else "new"
    return "trusted" if standing.groups >= rules.trusted_groups else "known"


def rate_ppm(
    standing: OwnerStanding, rules: TrustRules, *, worth_micros: int = 0, held_micros: int = 0, ease: float = 0.0
) -> int:
    """How many of a million claims of this owner are audited that are worth so much while the escrow holds so much."""
    rate = _rate(standing, rules)
    if 0 < rate < 1 and ease and rules.trusted_floor:
        rate -= ease * max(0.0, rate - rules.trusted_floor)
    if 0 < rate < 1 and worth_micros:
        worth = rules.escrow_factor * worth_micros
        rate = max(rate, worth / (worth + held_micros) if worth else 0.0)
    return math.ceil(ALL_PPM * rate)


def _rate(standing: OwnerStanding, rules: TrustRules) -> float:
    """The share that is audited whatever the escrow holds."""
    if level(standing, rules) in ("new", "held", "banned"):
        return 1.0
    floor = rules.trusted_floor if standing.groups >= rules.trusted_groups else rules.floor
    counted = min(standing.claims, LEAD * standing.groups)
    return min(1.0, max(floor, rules.first_groups / max(1, counted)))


def window(standing: OwnerStanding, rules: TrustRules, *, drawn_ppm: int = ALL_PPM) -> int:
    """How many unaudited groups stay unpaid, where some of them were drawn at this rate, which may be lower than usual.

    None do where nothing is ever audited, since nothing could be found.
    """
    rate = min(rate_ppm(standing, rules), drawn_ppm)
    return math.ceil(rules.escrow_factor * (ALL_PPM - rate) / rate) if rate else 0


def validated(standing: OwnerStanding, rules: TrustRules, groups: int = 1) -> OwnerStanding:
    """After so many more groups were found to be right, or their window was."""
    count = standing.groups + groups
    return replace(standing, groups=count, hard=0 if count >= rules.trusted_groups else standing.hard)


def lifted(standing: OwnerStanding, before: OwnerStanding, *, counts: bool) -> OwnerStanding:
    """After a hard fault, that was the last and still counts or not, turned out to be none: what it took comes back."""
    hard = standing.hard - 1 if counts else standing.hard
    return replace(standing, claims=standing.claims + before.claims, groups=standing.groups + before.groups, hard=hard)


def after_verdict(
    standing: OwnerStanding, finding: Finding, rules: TrustRules, groups: int = 1, *, again: bool = False
) -> OwnerStanding:
    """After a verdict on a claim that counts for so many groups; `again`, if a fault on the same group stands."""
    match finding:
        case "pass":
            return validated(standing, rules, groups)
        case "soft":
            return replace(standing, groups=min(standing.groups, rules.first_groups), soft=standing.soft + 1)
        case "hard":
            hard = max(1, standing.hard) if again else standing.hard + 1
            return replace(standing, claims=0, groups=0, hard=hard)
        case "pardon":
            return standing
