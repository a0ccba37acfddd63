"""Whose chunk leaves next: pure decisions about the streams that have one to send.

- At most `most` send at once; the others wait, and go in the order in which they came. Of those who may go, whoever is
  of the group (the address) that sends the least comes first: many streams from one place get no more than one does.
- While somebody has something to get who is behind the other nodes, by its own word, no more than half of the others
  send. Links are shared equally by all that is sent, so this leaves more to those behind; what they lack, nobody can
  get from them.
- A turn counts for that only while it is fresh, and nobody waits longer for those behind. So whoever makes others wait
  must itself take chunks about as fast as they would: neither those who say that they are behind nor those who are slow
  can stop anybody by just staying.
- Where all turns are taken, a stream waits for `patience_s`.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)

FRESH_S = 2.0
"""How long a turn makes others wait, and how long anybody waits for those behind."""


@dataclass(frozen=True)
class _Turn:
    group: str
    is_behind: bool
    since: float
    """When it began to send; before, to wait."""

    def is_fresh(self, now: float) -> bool:
        return now < self.since + FRESH_S


class Turns(Generic[Who]):
    """Those who wait and those who send; times are the caller's clock."""

    def __init__(self, most: int, patience_s: float = math.inf) -> None:
        self._most, self._patience_s = most, patience_s
        self._waiting: dict[Who, _Turn] = {}
        self._sending: dict[Who, _Turn] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sending)

    @property
    def full(self) -> bool:
        return len(self._sending) >= self._most

    def is_sending(self, who: Who) -> bool:
        return who in self._sending

    def wait(self, who: Who, now: float, *, is_behind: bool, group: str = "") -> None:
        """It has a chunk to send; who waits already keeps its place and its time."""
        before = self._waiting.get(who)
        self._waiting[who] = _Turn(group, is_behind, before.since if before else now)

    def leave(self, who: Who) -> None:
        """Its chunk is sent, or need not be."""
        self._waiting.pop(who, None)
        self._sending.pop(who, None)

    def admit(self, now: float) -> list[Who]:
        """Those whose turn has come; they send from now on."""
        admitted = []
        while not self.full and (who := self._next(now)) is not None:
            waited = self._waiting.pop(who)
            self._sending[who] = _Turn(waited.group, waited.is_behind, now)
            admitted.append(who)
        return admitted

    def look_again_at(self, who: Who, now: float) -> float:
        """When time alone changes something for one who waits: it waits no longer for those behind, or at all."""
        if who not in self._waiting:
            return math.inf
        since = self._waiting[who].since
        return min((at for at in (since + FRESH_S, since + self._patience_s) if at > now), default=now)

    def waits_in_vain(self, who: Who, now: float) -> bool:
        """It was patient, and all turns are taken."""
        return self.full and who in self._waiting and now >= self._waiting[who].since + self._patience_s

    def _next(self, now: float) -> Who | None:
        fresh = [turn for turn in self._sending.values() if turn.is_fresh(now)]
        count = [*fresh, *self._waiting.values()]
        in_step, sending = (sum(not turn.is_behind for turn in turns) for turns in (count, fresh))
        all_may = in_step == len(count) or 2 * sending < in_step
        held = Counter([turn.group for turn in self._sending.values()])
        first, fewest = None, self._most
        for who, turn in self._waiting.items():
            if (all_may or turn.is_behind or not turn.is_fresh(now)) and held.get(turn.group, 0) < fewest:
                first, fewest = who, held.get(turn.group, 0)
                if not fewest:
                    break
        return first
