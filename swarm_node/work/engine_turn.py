"""Turns of an agent's rounds at its engine: one at a time, and the first in the order that has work.

    WAITING ─acquire─▶ HOLDER ─release─▶ LENT ──another round acquires it─▶ (no turn)
       ▲                  ▲───acquire─────┘                                     │
       └────────────────────────────────────────────────────────────────────────┘

- The order is that of the owner's list, unless `set_order` sets another one. "Earlier" is meant in it.
- A round that has work waits for the engine, and has it when the holder releases it. Of several, the earliest.
- `must_release` asks the holder to finish: an earlier round has work. No lease is returned for a switch.
- A round in which episodes are played may finish them, for at most `EPISODES_END_S` while an earlier round waits.
- A round that releases the engine lends it: while no other round acquires it, nothing is reloaded.
- A round whose version is not in the engine requests leases first, and acquires the engine for them (`worker`). So a
  request without success in an earlier round costs a later one nothing.
- An agent with one round always has its turn.

If the owner wants the best paid round first, `order_by_pay` gives the order:

- An hour's pay is the price of the last lease, or else the node's own, times the speed of this machine with the round's
  model. Without a speed a round comes after those that have one.
- A round that was not in the engine in this run comes first in its unit, until its first load has measured it or
  failed: otherwise a busy round would keep the others from being measured. Speeds of earlier runs do not count: cards
  and engine may have changed.
- Amounts of different units are not compared: units come in the order in which the owner's list names them first.
- Rounds that pay the same stay in the order of the owner's list.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import trio

from protocol.limits import HOUR_S
from swarm_node.base.waiting import first_of

LEND_AFTER_S = 0.3
"""Wait for the answer to a request for work before another round may use the engine: the coordinator holds a request
for which it has no work yet."""

EPISODES_END_S = 300.0
"""Longest time for which a round goes on with the next turns of its episodes while an earlier round waits."""

REQUEST_AGAIN_S = 2.0
"""Shortest pause between two requests without success, while another round uses the engine."""


class EngineTurns:
    """The turns of all rounds of an agent; rounds are numbered as in the owner's list."""

    def __init__(self) -> None:
        self._holder, self._is_lent = 0, True
        self.changes = 0
        """Number of times that another round has acquired the engine: what was loaded before the last time is gone."""
        self._ranks: dict[int, int] = {}
        """The place of each round in the order; empty: that of the owner's list."""
        self._waiting: dict[int, float] = {}
        """The rounds that wait, and since when."""
        self._changed = trio.Event()

    @property
    def holder(self) -> int:
        """The round that used the engine last, and may still have its version there."""
        return self._holder

    def turn_of(self, number: int) -> "EngineTurn":
        """Return the turn of a round."""
        return EngineTurn(self, number)

    def set_order(self, order: Sequence[int]) -> None:
        """Set which round comes first, and which after it; the holder is asked to release if another one now does."""
        ranks = {number: rank for rank, number in enumerate(order)}
        if ranks != self._ranks:
            self._ranks = ranks
            self._notify()

    def _comes_before(self, number: int, other: int) -> bool:
        return self._ranks.get(number, number) < self._ranks.get(other, other)

    def try_acquire(self, number: int) -> bool:
        """Give a round the engine if it has the engine already, or if no other round uses it or comes first."""
        if not self._is_lent:
            return self._holder == number
        if self.must_release(number):
            return False
        self.changes += self._holder != number
        self._holder, self._is_lent = number, False
        self._notify()
        return True

    async def acquire(self, number: int) -> None:
        """Wait until a round has the engine."""
        self._waiting[number] = trio.current_time()
        self._notify()
        try:
            while not self.try_acquire(number):
                await self._changed.wait()
        finally:
            self._waiting.pop(number, None)
            self._notify()

    def release(self, number: int) -> None:
        """Let another round acquire the engine."""
        if self._holder == number and not self._is_lent:
            self._is_lent = True
            self._notify()

    def is_used_before(self, number: int) -> bool:
        """Return True if an earlier round uses the engine."""
        return self._comes_before(self._holder, number) and not self._is_lent

    def is_used_by_other(self, number: int) -> bool:
        """Return True if another round uses the engine."""
        return self._holder != number and not self._is_lent

    async def until_used_before(self, number: int, *, used: bool) -> None:
        """Return when an earlier round uses the engine, or with `used` False when none does."""
        while self.is_used_before(number) != used:
            await self._changed.wait()

    def must_release(self, number: int) -> bool:
        """Return True if an earlier round waits for the engine."""
        return any(self._comes_before(other, number) for other in self._waiting)

    def is_overdue(self, number: int) -> bool:
        """Return True if an earlier round has waited for the engine for longer than episodes may take to end."""
        now = trio.current_time()
        return any(
            self._comes_before(other, number) and now >= since + EPISODES_END_S
            for other, since in self._waiting.items()
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class EngineTurn:
    """The turns of one round."""

    def __init__(self, turns: EngineTurns, number: int) -> None:
        self._turns, self._number = turns, number

    @property
    def is_mine(self) -> bool:
        """True if no other round has acquired the engine since this one had it."""
        return self._turns.holder == self._number

    @property
    def changes(self) -> int:
        """Number of times that the engine has changed hands."""
        return self._turns.changes

    @property
    def is_used_by_other(self) -> bool:
        """True if another round uses the engine."""
        return self._turns.is_used_by_other(self._number)

    @property
    def is_used_before(self) -> bool:
        """True if an earlier round uses the engine: leases of this round would wait for long."""
        return self._turns.is_used_before(self._number)

    @property
    def must_release(self) -> bool:
        """True if an earlier round has work, and waits for the engine."""
        return self._turns.must_release(self._number)

    @property
    def is_overdue(self) -> bool:
        """True if an earlier round has waited for so long that no next turn is begun."""
        return self._turns.is_overdue(self._number)

    def try_acquire(self) -> bool:
        """Acquire the engine if no other round uses it; return True if this round has it."""
        return self._turns.try_acquire(self._number)

    async def acquire(self) -> bool:
        """Wait for the engine; return True."""
        await self._turns.acquire(self._number)
        return True

    async def acquire_unless_used(self) -> bool:
        """Wait for the engine; return False as soon as an earlier round uses it."""
        return await first_of(self.acquire, self._used_before)

    def release(self) -> None:
        """Let another round acquire the engine."""
        self._turns.release(self._number)

    async def unused_before(self) -> None:
        """Return when no earlier round uses the engine."""
        await self._turns.until_used_before(self._number, used=False)

    async def _used_before(self) -> bool:
        await self._turns.until_used_before(self._number, used=True)
        return False


MTOK = 1_000_000


class RoundPay(NamedTuple):
    """The pay of a round for this node."""

    unit: str
    """Name of the unit, which the round's root pins."""
    price_micros_per_mtok: int
    tokens_per_s: float = 0.0
    """The speed of this machine with the round's model; 0 if it was not measured."""
    is_new: bool = False
    """True until a version of the round was loaded in this run, or could not be."""

    @property
    def hour_micros(self) -> int | None:
        """Credit for an hour of work in micro-units; None if the speed is not known."""
        if not self.tokens_per_s:
            return None
        return int(self.price_micros_per_mtok * self.tokens_per_s * HOUR_S / MTOK)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `status` has them."""
        return {"price_micros_per_mtok": self.price_micros_per_mtok, "hour_micros": self.hour_micros}


def order_by_pay(rounds: Sequence[RoundPay]) -> tuple[int, ...]:
    """Return the places of rounds in the owner's list, the round that goes first at the beginning."""
    units = list(dict.fromkeys(pay.unit for pay in rounds))

    def key(number: int) -> tuple[int, bool, float, int]:
        pay = rounds[number]
        return units.index(pay.unit), not pay.is_new, -(pay.hour_micros or 0), number

    return tuple(sorted(range(len(rounds)), key=key))
