"""How closely an owner is looked at, by what audits found: rates, windows, faults and sanctions.

| level | when | rate | escrow |
|---|---|---|---|
| `new` | fewer than `first_groups` validated | everything | posted as audited |
| `known` | then | `first_groups` / n, at least `floor` | the window |
| `trusted` | from `trusted_groups` on | `trusted_floor` | the window |
| `held` | after one hard fault, until `first_groups` more are validated | everything | nothing is posted unaudited |
| `banned` | after a second, independent one | no more leases | void |

- Trust belongs to the owner, under whom many nodes may work. n counts accepted groups, but at most `LEAD` times the
  validated ones: a flood of forgeries cannot talk its rate down, and a slow auditor makes nobody a newcomer.
- A hard fault sets all counts to 0. `trusted_groups` validated groups later it is forgotten: an honest node that chance
  accuses once in ten thousand audits is not to be banned in the end.
- A soft fault sets n back to where one group in `LEAD` is audited; it takes no money.
- The window is what makes cheating worthless: whoever cheats once gains one payment with chance 1 − q and loses
  the escrow with chance q, so (1 − q) / q payments are held back.
- Pure: standings in, standings out.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from coordinator.audit.drawing import ALL_PPM

Level = Literal["new", "known", "trusted", "held", "banned"]
Finding = Literal["pass", "soft", "hard", "pardon"]
"""What an audit of one claim found; pardon: nothing, by no fault of the node's."""

FAULTS_TO_BAN = 2
"""Independent: on two claims, whose seeds have nothing in common."""

LEAD = 4
"""How far accepted groups may run ahead of validated ones."""


@dataclass(frozen=True)
class Rules:
    """What the operator set."""

    first_groups: int = 10
    floor: float = 0.05
    trusted_groups: int = 1000
    trusted_floor: float = 0.02
    escrow_factor: float = 1.0


@dataclass(frozen=True)
class Standing:
    """What is known of one owner."""

    claims: int = 0
    """Accepted since the last hard fault."""
    groups: int = 0
    """Validated since then."""
    soft: int = 0
    hard: int = 0
    """Not forgotten yet."""


def level(standing: Standing, rules: Rules) -> Level:
    if standing.hard >= FAULTS_TO_BAN:
        return "banned"
    if standing.groups < rules.first_groups:
        return "held" if standing.hard else "new"
    return "trusted" if standing.groups >= rules.trusted_groups else "known"


def rate_ppm(standing: Standing, rules: Rules) -> int:
    """How many of a million claims of this owner are audited."""
    if level(standing, rules) in ("new", "held", "banned"):
        return ALL_PPM
    floor = rules.trusted_floor if standing.groups >= rules.trusted_groups else rules.floor
    counted = min(standing.claims, LEAD * standing.groups)
    return math.ceil(ALL_PPM * min(1.0, max(floor, rules.first_groups / max(1, counted))))


def window(standing: Standing, rules: Rules) -> int:
    """How many unaudited groups stay unpaid; none where nothing is ever audited, since nothing could be found."""
    rate = rate_ppm(standing, rules)
    return math.ceil(rules.escrow_factor * (ALL_PPM - rate) / rate) if rate else 0


def validated(standing: Standing, rules: Rules, groups: int = 1) -> Standing:
    """After so many more groups were found to be right, or their window was."""
    count = standing.groups + groups
    return replace(standing, groups=count, hard=0 if count >= rules.trusted_groups else standing.hard)


def found(standing: Standing, finding: Finding, rules: Rules) -> Standing:
    """After a verdict."""
    match finding:
        case "pass":
            return validated(standing, rules)
        case "soft":
            return replace(standing, groups=min(standing.groups, rules.first_groups), soft=standing.soft + 1)
        case "hard":
            return replace(standing, claims=0, groups=0, hard=standing.hard + 1)
        case "pardon":
            return standing
