"""Whose chunk leaves next: pure decisions about the streams that have one to send.

- At most `most` send at once; the others wait, and go in the order in which they came.
- While somebody has something to get who is behind the other nodes, by its own word, no more than half of the others
  send. Links are shared equally by all that is sent, so this leaves more to those behind; what they lack, nobody can
  get from them.
- A turn counts for that only while it is fresh. So whoever makes others wait must itself take chunks about as fast as
  they would: neither those who say that they are behind nor those who are slow can stop anybody by just staying.
- Who has waited for long goes, if there is room.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)

FRESH_S = 2.0
"""How long a turn makes others wait, and how long anybody waits for those behind."""


@dataclass(frozen=True)
class _Turn:
    is_behind: bool
    since: float
    """When it began to send; before, to wait."""


class Turns(Generic[Who]):
    """Those who wait and those who send; times are the caller's clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[Who, _Turn] = {}
        self._sending: dict[Who, _Turn] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sending)

    @property
    def full(self) -> bool:
        return len(self._sending) >= self._most

    def is_sending(self, who: Who) -> bool:
        return who in self._sending

    def wait(self, who: Who, now: float, *, is_behind: bool) -> None:
        """It has a chunk to send; who waits already keeps its place."""
        self._waiting[who] = _Turn(is_behind, now)

    def leave(self, who: Who) -> None:
        """Its chunk is sent, or need not be."""
        self._waiting.pop(who, None)
        self._sending.pop(who, None)

    def go(self, who: Who, now: float) -> bool:
        """It has waited for long: it sends now, unless there is no room."""
        if who in self._waiting and not self.full:
            self._begin(who, now)
        return who in self._sending

    def admit(self, now: float) -> list[Who]:
        """Those whose turn has come; they send from now on."""
        admitted = []
        while not self.full and (who := self._next(now)) is not None:
            self._begin(who, now)
            admitted.append(who)
        return admitted

    def _begin(self, who: Who, now: float) -> None:
        self._sending[who] = _Turn(self._waiting.pop(who).is_behind, now)

    def _next(self, now: float) -> Who | None:
        fresh = [turn for turn in self._sending.values() if now < turn.since + FRESH_S]
        count = [*fresh, *self._waiting.values()]
        in_step, sending = (sum(not turn.is_behind for turn in turns) for turns in (count, fresh))
        all_may = in_step == len(count) or 2 * sending < in_step
        return next((who for who, turn in self._waiting.items() if all_may or turn.is_behind), None)
