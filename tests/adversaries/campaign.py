"""A campaign: an attack, played to its end beside honest nodes, and its result."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

from ledger.book import ClaimState
from tests.adversaries.arena import Arena, Stage, money
from tests.adversaries.nodes import Adversary, Node

A = TypeVar("A", bound=Adversary)

HONEST_NODES = 2

TURNS_PER_GROUP = 2
"""Turns after which a campaign ends that gets no leases any more."""


@dataclass(frozen=True)
class Result:
    """The result of an attack."""

    attack: str
    cheats: int
    """Groups that it did not work for."""
    groups: int
    """Groups that were sent, with those that it did."""
    noticed_after: int | None
    """Cheats until the first was found; None if none ever was."""
    by: str
    banned: bool
    gain_micros: int
    """Paid for cheats, less voided of honest work."""
    per_group_micros: float
    """Mean micro-units that an honest group earned."""
    honest_groups: int
    honest_hard_faults: int
    honest_voided_micros: int

    @property
    def gain_groups(self) -> float:
        return self.gain_micros / self.per_group_micros


def fight(attack: type[A], stage: Stage, groups: int, *, secret: int = 0) -> tuple[Arena, A, Result]:
    """Play until the attacker was given so many groups, or is banned; then to the end of the round."""
    with TemporaryDirectory() as folder:
        arena = Arena(Path(folder), stage, secret=secret)
        honest = [arena.enter(Node) for _ in range(HONEST_NODES)]
        attacker = cast(A, arena.enter(attack))
        arena.play(TURNS_PER_GROUP * groups, until=lambda: attacker.banned or attacker.given >= groups)
        arena.finish()
        result = told(arena, attacker, honest)
        arena.world.database.close()
    return arena, attacker, result


def told(arena: Arena, attacker: Adversary, honest: list[Node]) -> Result:
    """Return the result that the store and the book show at the end."""
    own = money(arena, attacker)
    posted, voided = ClaimState.POSTED.value, ClaimState.VOIDED.value
    paid = sum(micros for lease, (state, micros) in own.items() if state == posted and lease in attacker.cheated)
    lost = sum(micros for lease, (state, micros) in own.items() if state == voided and lease not in attacker.cheated)
    theirs = [outcome for node in honest for outcome in money(arena, node).values()]
    earned = [micros for state, micros in theirs if state == posted]
    return Result(
        attack=attacker.attack,
        cheats=len(attacker.cheated),
        groups=attacker.given,
        noticed_after=attacker.noticed_after,
        by=", ".join(sorted({*attacker.codes, *(["replay"] if attacker.hard_faults else [])})),
        banned=attacker.banned,
        gain_micros=paid - lost,
        per_group_micros=sum(earned) / len(earned),
        honest_groups=len(theirs),
        honest_hard_faults=sum(node.hard_faults for node in honest),
        honest_voided_micros=sum(micros for state, micros in theirs if state == voided),
    )
