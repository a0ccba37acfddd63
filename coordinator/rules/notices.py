"""Messages about alarms and incidents: which are due, and when each is sent again. Pure: the store has the book.

1. An alarm that stands for `hold_s` causes one message, and one more when it has been over for `hold_s`. The figures
   in its text change meanwhile, which causes none.
2. Incidents are collected: one message an hour at most. The same incident of the same node counts once a day.
3. A message waits in the book until each channel has accepted it. A channel that fails is tried again after growing
   pauses, for a day. The id of a message never changes, so that a receiver recognizes one that comes twice.
4. The book is stored before anything is sent: a restart repeats no message that was accepted, and forgets none.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from coordinator.config import NotifySection
from protocol.limits import DAY_MS, HOUR_MS

MINUTE_MS = 60_000

PAUSES_MS = (10_000, MINUTE_MS, 5 * MINUTE_MS, 15 * MINUTE_MS, HOUR_MS)
"""Pauses before the second, third … try; the last is repeated."""

GIVE_UP_MS = DAY_MS
"""The age at which an undelivered message is dropped: whoever comes back later looks at the status."""

WAITING_MAX = 100
"""Messages that wait: if a receiver is away, the oldest are dropped."""

INCIDENTS_SHOWN = 10
INCIDENTS_KNOWN = 200
"""Incidents that are remembered for a day; the status has no more than twenty at a time."""

LEVELS = ("warning", "critical")
NOTHING_MORE = "finished"

State = Literal["begins", "ends", "happened"]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True)


class StandingAlarm(_Stored):
    """An alarm that stands: since when, and since when it is over, if it is."""

    severity: str
    text: str
    since_ms: int
    gone_ms: int = 0
    notice: str = ""
    """The id of the message about it; empty before that."""


class Notice(_Stored):
    """A message to the operator, and the tries of each channel that has not accepted it."""

    id: str
    state: State
    code: str
    severity: str
    text: str
    since_ms: int
    at_ms: int
    waiting: dict[str, tuple[int, int]]
    """Channel → number of tries, and the time of the next."""


class NoticeBook(_Stored):
    """The alarms and incidents that were told, and the messages that still have to be sent."""

    number: int = 0
    standing: dict[str, StandingAlarm] = {}
    known: dict[str, int] = {}
    """Incident → when a message named it."""
    collected: dict[str, str] = {}
    """Incident → its text, for the next message."""
    told_ms: int = 0
    """The time of the last message about incidents."""
    outbox: tuple[Notice, ...] = ()


def observe(
    book: NoticeBook,
    alarms: Sequence[Mapping[str, str]],
    incidents: Iterable[tuple[str, str]],
    settings: NotifySection,
    now_ms: int,
) -> NoticeBook:
    """Return the book after a look at the round: `incidents` are pairs of a name that repeats and a text."""
    writer = _Writer(book, settings, now_ms)
    named = {each["code"]: each for each in alarms if LEVELS.index(each["severity"]) >= LEVELS.index(settings.level)}
    standing = {}
    for code in [*book.standing, *(code for code in named if code not in book.standing)]:
        if alarm := writer.follow(code, book.standing.get(code), named.get(code)):
            standing[code] = alarm
    return writer.finish(standing, incidents)


def sent(book: NoticeBook, notice_id: str, channel: str, now_ms: int, *, accepted: bool) -> NoticeBook:
    """Return the book after a try to send a message."""
    outbox = []
    for notice in book.outbox:
        if notice.id == notice_id and channel in notice.waiting:
            waiting = dict(notice.waiting)
            tries, _ = waiting.pop(channel)
            if not accepted and now_ms - notice.at_ms < GIVE_UP_MS:
                waiting[channel] = (tries + 1, now_ms + PAUSES_MS[min(tries, len(PAUSES_MS) - 1)])
            notice = notice.model_copy(update={"waiting": waiting})  # the message as it is now
        outbox.append(notice)
    return book.model_copy(update={"outbox": tuple(notice for notice in outbox if notice.waiting)})


def due(book: NoticeBook, now_ms: int) -> list[tuple[Notice, str]]:
    """Return the messages to send now, oldest first, each with its channel."""
    return [(notice, channel) for notice in book.outbox for channel, (_, at) in notice.waiting.items() if at <= now_ms]


class _Writer:
    """Writes the messages of one look."""

    def __init__(self, book: NoticeBook, settings: NotifySection, now_ms: int) -> None:
        self._book, self._settings, self._now_ms = book, settings, now_ms
        self._number, self._outbox = book.number, list(book.outbox)

    def follow(self, code: str, before: StandingAlarm | None, named: Mapping[str, str] | None) -> StandingAlarm | None:
        """Return an alarm as it stands now; None if it is over."""
        if named is None:
            return self._without(code, before) if before else None
        alarm = StandingAlarm(severity=named["severity"], text=named["text"], since_ms=self._now_ms)
        if before:
            alarm = before.model_copy(update={"text": named["text"], "gone_ms": 0})
        if alarm.notice or self._now_ms - alarm.since_ms < 1000 * self._settings.hold_s:
            return alarm
        notice = self._write("begins", code, alarm.severity, alarm.text, alarm.since_ms)
        return alarm.model_copy(update={"notice": notice})

    def _without(self, code: str, before: StandingAlarm) -> StandingAlarm | None:
        if not before.notice:
            return None
        alarm = before if before.gone_ms else before.model_copy(update={"gone_ms": self._now_ms})
        if self._now_ms - alarm.gone_ms < 1000 * self._settings.hold_s:
            return alarm
        self._write("ends", code, alarm.severity, alarm.text, alarm.since_ms)
        return None

    def finish(self, standing: dict[str, StandingAlarm], incidents: Iterable[tuple[str, str]]) -> NoticeBook:
        """Add the message about incidents, if one is due; return the new book."""
        book, now_ms, seen = self._book, self._now_ms, dict(incidents)
        known = {
            name: at
            for name, at in book.known.items()
            if now_ms - at < DAY_MS or (name == NOTHING_MORE and name in seen)  # a round stays finished
        }
        fresh = {name: text for name, text in seen.items() if name not in known}
        collected = dict(list((book.collected | fresh).items())[:INCIDENTS_KNOWN])
        told_ms = book.told_ms
        if collected and (now_ms - told_ms >= HOUR_MS or NOTHING_MORE in collected):
            shown = list(collected.values())
            rest = [f"… and {len(shown) - INCIDENTS_SHOWN} more"] if len(shown) > INCIDENTS_SHOWN else []
            self._write("happened", "incidents", "warning", "\n".join(shown[:INCIDENTS_SHOWN] + rest), now_ms)
            known |= dict.fromkeys(collected, now_ms)
            collected, told_ms = {}, now_ms
        return NoticeBook(
            number=self._number,
            standing=standing,
            known=dict(list(known.items())[-INCIDENTS_KNOWN:]),
            collected=collected,
            told_ms=told_ms,
            outbox=tuple(self._outbox[-WAITING_MAX:]),
        )

    def _write(self, state: State, code: str, severity: str, text: str, since_ms: int) -> str:
        self._number += 1
        notice = Notice(
            id=f"{self._number}", state=state, code=code, severity=severity, text=text, since_ms=since_ms,
            at_ms=self._now_ms, waiting=dict.fromkeys(self._settings.channels, (0, 0)),
        )  # fmt: skip
        self._outbox.append(notice)
        return notice.id
