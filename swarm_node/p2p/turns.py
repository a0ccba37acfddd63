"""Order in which streams send their chunks: decisions only, no I/O.

- At most `most` streams send at once; the others wait in order of arrival. Among streams that may send, one of the
  group (the address) that sends the least comes first: many streams from one address get no more than one does.
- While a requester that claims to be behind other nodes has a chunk to get, at most half of the others send. All sends
  share the link equally, so this leaves more to requesters that are behind; other nodes cannot get from them what they
  lack.
- A turn counts for that rule only while it is fresh, and no stream waits longer than that for those behind. So a
  requester that makes others wait must itself read chunks about as fast as they would: neither a claim to be behind
  nor slow reading can block others for long.
- Where all turns are taken, a stream waits for `patience_s`.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)

FRESH_S = 2.0
"""Time for which a turn makes others wait, and for which a stream waits for those behind."""


@dataclass(frozen=True)
class _Turn:
    group: str
    is_behind: bool
    since: float
    """Time at which it began to send, or to wait if it does not send yet."""

    def is_fresh(self, now: float) -> bool:
        return now < self.since + FRESH_S


class Turns(Generic[Who]):
    """Streams that wait and streams that send; times are the caller's clock."""

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
        """Queue a stream that has a chunk to send; a stream that already waits keeps its place and its time."""
        before = self._waiting.get(who)
        self._waiting[who] = _Turn(group, is_behind, before.since if before else now)

    def leave(self, who: Who) -> None:
        """Remove a stream: its chunk is sent, or not needed any more."""
        self._waiting.pop(who, None)
        self._sending.pop(who, None)

    def admit(self, now: float) -> list[Who]:
        """Return the streams whose turn has come; they count as sending from now on."""
        admitted = []
        while not self.full and (who := self._next(now)) is not None:
            waited = self._waiting.pop(who)
            self._sending[who] = _Turn(waited.group, waited.is_behind, now)
            admitted.append(who)
        return admitted

    def look_again_at(self, who: Who, now: float) -> float:
        """Return the time at which a waiting stream stops waiting for those behind, or stops waiting at all."""
        if who not in self._waiting:
            return math.inf
        since = self._waiting[who].since
        return min((at for at in (since + FRESH_S, since + self._patience_s) if at > now), default=now)

    def waits_in_vain(self, who: Who, now: float) -> bool:
        """Return True if the stream waited for `patience_s` and all turns are still taken."""
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
