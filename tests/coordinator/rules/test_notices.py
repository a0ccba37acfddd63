"""Messages to the operator: one for an alarm, one for its end, none lost and none repeated."""

from typing import Any

from coordinator.config import NotifySection
from coordinator.rules import notices
from coordinator.rules.notices import WAITING_MAX, Notice, NoticeBook
from protocol.limits import DAY_MS, HOUR_MS

HOLD_MS = 120_000
MAIL: dict[str, Any] = {
    "mail_to": ("op@example.org",),
    "mail_from": "round@example.org",
    "smtp": "example.org:587",
}
SETTINGS = NotifySection(webhook="https://example.org/", hold_s=HOLD_MS / 1000, **MAIL)
START_MS = 10 * DAY_MS


def alarm(code: str, text: str = "It hangs.", severity: str = "critical") -> dict[str, str]:
    return {"code": code, "severity": severity, "text": text}


class Days:
    """A book, and what happens to it."""

    def __init__(self, settings: NotifySection = SETTINGS) -> None:
        self.book, self.settings, self.now_ms = NoticeBook(), settings, START_MS

    def look(self, *alarms: dict[str, str], incidents: Any = (), after_ms: int = 0) -> list[tuple[str, str]]:
        """Look at the round; return the new messages."""
        self.now_ms += after_ms
        before = self.book.number
        self.book = NoticeBook.model_validate_json(self.book.model_dump_json())  # as the store keeps it
        self.book = notices.observe(self.book, alarms, incidents, self.settings, self.now_ms)
        return [(each.state, each.code) for each in self.book.outbox if int(each.id) > before]

    def deliver(self, *, accepted: bool, channels: tuple[str, ...] = SETTINGS.channels) -> list[tuple[str, str]]:
        """Try all that is due; return it."""
        tried = notices.due(self.book, self.now_ms)
        for notice, channel in tried:
            yes = accepted and channel in channels
            self.book = notices.sent(self.book, notice.id, channel, self.now_ms, accepted=yes)
        return [(notice.id, channel) for notice, channel in tried]


def test_an_alarm_is_one_message_and_its_end_another() -> None:
    days = Days()
    assert days.look(alarm("a", "31 % of the time")) == []
    assert days.look(alarm("a", "35 % of the time"), after_ms=HOLD_MS) == [("begins", "a")]
    assert "35 %" in days.book.outbox[-1].text
    assert days.book.outbox[-1].since_ms == START_MS
    for _ in range(100):
        assert days.look(alarm("a", "36 % of the time"), after_ms=HOLD_MS) == []
    assert days.look(after_ms=10_000) == []
    assert days.look(after_ms=HOLD_MS) == [("ends", "a")]
    assert days.look(after_ms=DAY_MS) == []


def test_an_alarm_that_flickers_wakes_nobody() -> None:
    days = Days()
    for _ in range(50):
        assert days.look(alarm("a"), after_ms=HOLD_MS // 2) == []
        assert days.look(after_ms=10_000) == []
    days.look(alarm("a"))
    assert days.look(alarm("a"), after_ms=HOLD_MS) == [("begins", "a")]
    for _ in range(50):
        assert days.look(after_ms=HOLD_MS // 2) == []
        assert days.look(alarm("a"), after_ms=10_000) == []


def test_a_restart_neither_repeats_an_alarm_nor_ends_it_before_a_look() -> None:
    days = Days()
    days.look(alarm("a"))
    days.look(alarm("a"), after_ms=HOLD_MS)
    assert days.look(after_ms=HOUR_MS) == [], "the first look after a restart may come too early"
    assert days.look(alarm("a"), after_ms=10_000) == []


def test_a_level_hides_what_is_below_it() -> None:
    days = Days(NotifySection(level="critical", hold_s=0, **MAIL))
    assert days.look(alarm("a", severity="warning"), alarm("b")) == [("begins", "b")]


def test_incidents_come_once_an_hour_and_the_same_once_a_day() -> None:
    days = Days()
    assert days.look(incidents=[("n1 wrong_chunk", "heron: wrong_chunk")]) == [("happened", "incidents")]
    many = [("n1 wrong_chunk", "again"), *((f"n{number} x", f"x of {number}") for number in range(2, 30))]
    assert days.look(incidents=many, after_ms=10_000) == []
    assert days.look(incidents=[], after_ms=HOUR_MS) == [("happened", "incidents")]
    lines = days.book.outbox[-1].text.splitlines()
    assert lines[0] == "x of 2"
    assert lines[-1] == f"… and {28 - notices.INCIDENTS_SHOWN} more"
    assert days.look(incidents=many, after_ms=HOUR_MS) == []
    assert days.look(incidents=many, after_ms=DAY_MS) == [("happened", "incidents")]


def test_the_end_of_a_round_is_told_at_once_and_once() -> None:
    days = Days()
    days.look(incidents=[("n1 x", "x")])
    done = [(notices.NOTHING_MORE, "The round is finished after 30 updates.")]
    assert days.look(incidents=done, after_ms=10_000) == [("happened", "incidents")]
    assert days.look(incidents=done, after_ms=10_000) == []
    assert days.look(incidents=done, after_ms=2 * DAY_MS) == [], "it is no news of the next day"
    days.look(incidents=[], after_ms=10_000)
    assert days.look(incidents=done, after_ms=DAY_MS) == [("happened", "incidents")], "it was prolonged, and ends again"


def test_a_message_waits_for_each_channel_with_growing_pauses() -> None:
    days = Days()
    days.look(incidents=[("a", "a")])
    assert days.deliver(accepted=True, channels=("mail",)) == [("1", "webhook"), ("1", "mail")]
    assert days.deliver(accepted=True) == [], "not before the pause is over"
    pauses = []
    for _ in range(6):
        ((_, at_ms),) = days.book.outbox[0].waiting.values()
        pauses.append(at_ms - days.now_ms)
        days.now_ms = at_ms
        assert days.deliver(accepted=False) == [("1", "webhook")]
    assert pauses == [*notices.PAUSES_MS, notices.PAUSES_MS[-1]]
    days.now_ms += HOUR_MS
    assert days.deliver(accepted=True) == [("1", "webhook")]
    assert days.book.outbox == ()


def test_a_receiver_that_stays_away_costs_a_bounded_room_and_a_day() -> None:
    days = Days(NotifySection(webhook="https://example.org/", hold_s=0))
    for number in range(3 * WAITING_MAX):
        days.look(alarm(f"a{number}"), after_ms=1000)
    assert len(days.book.outbox) == WAITING_MAX
    newest: Notice = days.book.outbox[-1]
    days.now_ms = newest.at_ms + DAY_MS
    days.deliver(accepted=False)
    assert days.book.outbox == ()
