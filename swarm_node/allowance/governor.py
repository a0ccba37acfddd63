"""The governor: reads the machine's state every few seconds, applies the owner's limits, opens or closes the gate.

- Only the values that a limit or the display needs are read: without limits and cards, no program is started for them.
- Cards and user input are read in a thread, so that a hanging driver does not block the agent.
- `pause`, `snooze`, `resume`, `finish` and `leave` take effect at once; a changed `limits.toml` at the next reading.
- `pause`, `snooze`, `resume`, `finish` and `leave` may name a round (`round_gate`). The other rounds go on.
- `pause`, `snooze` and `resume` may name a card. The node's gate is closed while no card may work.
- Power is a mean over minutes, also while the engine pauses: so a pause ends.

Counter of a node's uploads in this month, kept over restarts, so that a limit holds.

- Bytes are counted in advance: a portion is saved as used before its first byte is sent. A killed node has counted too
  much, by at most one portion, never too little; a node that ends normally counts exactly.
- A month is a calendar month in UTC; a new one begins at zero.
- A file that cannot be read counts as a used-up month, so that the limit always holds.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import trio

from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.limits import GB
from swarm_node.allowance import settings
from swarm_node.allowance.round_gate import OwnerPause, RoundGate, find_round
from swarm_node.allowance.rules import CardReadings, Decision, Readings, decide, decide_card
from swarm_node.base.disk import write_durably
from swarm_node.coordinator_api.join_string import JoinString, parse
from swarm_node.machine import gpu, use

FILE = "uploads.json"
"""File in a node's home: all rounds share one network connection."""

PORTION_BYTES = 16 * limits.MIB
"""Small compared with any useful limit; the file is written once per few chunks."""


class UploadCounter:
    """Upload counter of one home."""

    def __init__(self, home: Path, now: Callable[[], datetime]) -> None:
        self._path, self._now = home / FILE, now
        self._month, self._ahead_bytes = self._read()
        self.bytes = self._ahead_bytes
        """Bytes uploaded this month."""
        self.cap_bytes: int | None = None
        self._writing = trio.Lock()

    async def count(self, size_bytes: int) -> bool:
        """Count bytes about to be sent; return False if the limit does not allow them."""
        self._turn()
        if self.cap_bytes is not None and self.bytes + size_bytes > self.cap_bytes:
            return False
        self.bytes += size_bytes
        while self.bytes > self._ahead_bytes:
            async with self._writing:
                if self.bytes > self._ahead_bytes:
                    await trio.to_thread.run_sync(self._write, self.bytes + PORTION_BYTES)
        return True

    @property
    def used_up(self) -> bool:
        """True if no more bytes may be sent this month."""
        self._turn()
        return self.cap_bytes is not None and self.bytes >= self.cap_bytes - limits.CHUNK_MAX_BYTES

    def this_month(self) -> int:
        """Return the bytes uploaded in the current month."""
        self._turn()
        return self.bytes

    def close(self) -> None:
        """Save the exact count."""
        if self._ahead_bytes != self.bytes:
            self._write(self.bytes)

    def _turn(self) -> None:
        month = f"{self._now():%Y-%m}"
        if month != self._month:
            self._month, self.bytes, self._ahead_bytes = month, 0, 0

    def _read(self) -> tuple[str, int]:
        month = f"{self._now():%Y-%m}"
        if not self._path.exists():
            return month, 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_bytes())
            return str(kept["month"]), max(0, int(kept["bytes"]))
        return month, limits.TRANSFER_MAX_BYTES

    def _write(self, ahead_bytes: int) -> None:
        said = json.dumps({"month": self._month, "bytes": ahead_bytes}).encode()
        write_durably(self._path, said, temp_folder=self._path.parent)
        self._ahead_bytes = ahead_bytes


log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0

WATTS_OVER_S = 180.0
"""Averaging time of the power limit: meters and breakers tolerate minutes; shorter pauses would cost more starts."""


class MeanPower:
    """Mean power of the last minutes, over readings at any intervals."""

    def __init__(self) -> None:
        self._watts: float | None = None
        self._measured_at = -math.inf

    def update(self, watts: float | None) -> float | None:
        """Return the mean, including this reading; None if there is none."""
        now = trio.current_time()
        passed_s, self._measured_at = now - self._measured_at, now
        if watts is None:
            return None
        weight = 1 - math.exp(-passed_s / WATTS_OVER_S)
        self._watts = watts if self._watts is None else self._watts + weight * (watts - self._watts)
        return self._watts


@dataclass
class GovernedCard:
    """A graphics card that the engines use, as the owner and the readings leave it."""

    pause: OwnerPause = field(default_factory=OwnerPause)
    power: MeanPower = field(default_factory=MeanPower)
    celsius: float | None = None
    watts: float | None = None
    """Mean power in the last minutes."""
    decision: Decision = field(default_factory=Decision)


class Governor:
    """Decides at any moment whether a node may work and upload."""

    def __init__(
        self,
        home: Path,
        uploads: UploadCounter,
        *,
        price: int = 0,
        given: dict[str, Any] | None = None,
        threads: int = 1,
        cards: Sequence[int] = (),
        look_at_cards: Callable[[], gpu.GpuProbe] = gpu.find_cards,
        look_at_load: Callable[[int], float | None] = use.others_load,
    ) -> None:
        self._home, self._uploads, self._price = home, uploads, price
        self.given = given or {}
        """Limits of this run, on top of those in the home."""
        self._read_cards = look_at_cards
        self._read_load = partial(look_at_load, threads)
        self._pause, self._finishing = OwnerPause(), False
        self._power = MeanPower()
        self._governed = {number: GovernedCard() for number in cards}
        self._rounds: list[RoundGate] = []
        self._decided: list[Decision] = []
        """The last decisions about the rounds."""
        self._changed = trio.Event()
        self._measured: dict[str, Any] = {}
        self.leaving = trio.Event()
        """Set by `leave`, and when a finishing node has no work left."""
        self.left_by = ""
        """The signal that ends the agent; empty if none came."""
        self.next_round = ""
        """Join string of the round that the node moves to when it has finished; empty: it ends."""
        self.cards = gpu.GpuProbe()
        """Last reading of the graphics cards, for display."""
        self.limits = settings.changed(home, self.given)
        self.decision = Decision()
        self._decide()

    @property
    def finishing(self) -> bool:
        return self._finishing

    @property
    def card_decisions(self) -> dict[int, Decision]:
        """The decision for each card that the engines use."""
        return {number: card.decision for number, card in self._governed.items()}

    async def run(self, *, watch_cards: bool = False) -> None:
        """Read and decide at intervals until cancelled; `watch_cards` reads the cards even if no limit needs them."""
        while True:
            self._reload()
            await self._measure(watch_cards)
            self._decide()
            with trio.move_on_after(LOOK_EVERY_S):
                await self.changes()

    def open_round(self, join: JoinString) -> RoundGate:
        """Return the gate of a round that the agent takes part in."""
        gate = RoundGate(self, join)
        self._rounds.append(gate)
        return gate

    def close_round(self, gate: RoundGate) -> None:
        """Accept no more orders about a round that has ended for this agent."""
        self._rounds.remove(gate)

    async def changes(self) -> None:
        """Return when the decision, or an order about a round, has changed."""
        await self._changed.wait()

    def pause(self, card: int | None = None, *, minutes: float | None = None, round_name: str | None = None) -> None:
        """Stop at once, and accept no work until `resume`, or for `minutes`; with a card or a round, only there."""
        pause = self._pause_of(card, round_name)
        pause.paused, pause.until = True, None if minutes is None else self._now() + timedelta(minutes=minutes)
        self._decide()

    def resume(self, card: int | None = None, *, round_name: str | None = None) -> None:
        """Work again, if the limits allow it, also where `finish` was ordered; without a round or card, everywhere."""
        pauses = [self._pause_of(card, round_name)]
        rounds = self._rounds if round_name is None else [find_round(self._rounds, round_name)]
        if card is None:
            pauses += [gate.pause for gate in rounds]
            for gate in rounds:
                gate.is_finishing = False
        if card is None and round_name is None:
            self._finishing, self.next_round = False, ""
            pauses += [governed.pause for governed in self._governed.values()]
        for pause in pauses:
            pause.paused, pause.until = False, None
        self._decide()

    def finish(self, *, round_name: str | None = None) -> None:
        """Accept no more work, and leave when the running groups have ended and are sent; with a name, this round."""
        if round_name is None:
            self._finishing, self.next_round = True, ""
        else:
            find_round(self._rounds, round_name).is_finishing = True
        self._decide()

    def move(self, join_string: str) -> None:
        """Finish, and continue with another round; `resume` and `finish` cancel this."""
        other = parse(join_string)
        if [gate.join.round_id for gate in self._rounds] == [other.round_id]:
            raise ConfigInvalid(
                f"This node already takes part in the round at {other.url}.",
                hint="`swarm-node resume` continues after `pause` or `finish`.",
            )
        self.finish()
        self.next_round = join_string

    def leave(self, *, round_name: str | None = None) -> None:
        """Leave now, and return the running leases; with a name, only this round."""
        (self if round_name is None else find_round(self._rounds, round_name)).leaving.set()

    def _decide(self) -> None:
        self._uploads.cap_bytes = int(self.limits.upload_gb * GB) or None
        now = self._now()
        governed, rounds = self._governed.values(), self._rounds
        for pause in (self._pause, *(card.pause for card in governed), *(gate.pause for gate in rounds)):
            pause.end_if_over(now)
        cards_before = self.card_decisions
        for number, card in self._governed.items():
            self._decide_card(number, card, now)
        seen = Readings(
            now=now,
            paused=self._pause.paused,
            paused_until=self._pause.until,
            finishing=self._finishing,
            resting=any(reason.why == "power" for reason in self.decision.reasons),
            uploaded_bytes=self._uploads.this_month(),
            price_micros_per_mtok=self._price,
            **self._measured,
        )
        before, self.decision = self.decision, decide(self.limits, seen, self.card_decisions)
        whys = [reason.why for reason in self.decision.reasons]
        if whys != [reason.why for reason in before.reasons]:
            log.info("work paused: %s", self.decision.reason_line) if whys else log.info("work continues")
        if self.decision.no_upload and not before.no_upload:
            log.info("uploads stopped: %s", self.decision.no_upload)
        rounds_before, self._decided = self._decided, [gate.decision for gate in rounds]
        if self.decision != before or self.card_decisions != cards_before or self._decided != rounds_before:
            self._changed.set()
            self._changed = trio.Event()

    def _decide_card(self, number: int, card: GovernedCard, now: datetime) -> None:
        whys = frozenset(reason.why for reason in card.decision.reasons)
        pause = card.pause
        seen = CardReadings(now, pause.paused, pause.until, card.celsius, card.watts, whys)
        card.decision = decide_card(number, self.limits, seen)
        if whys != {reason.why for reason in card.decision.reasons}:
            said = card.decision.reason_line
            log.info("card %d paused: %s", number, said) if said else log.info("card %d continues", number)

    def _pause_of(self, card: int | None, round_name: str | None) -> OwnerPause:
        if card is not None and round_name is not None:
            raise ConfigInvalid("`--card` and a round cannot be combined.", hint="Name a round or a card.")
        if round_name is not None:
            return find_round(self._rounds, round_name).pause
        if card is None:
            return self._pause
        if card not in self._governed:
            used = ", ".join(map(str, self._governed)) or "none"
            raise ConfigInvalid(f"This node uses no card {card}.", hint=f"It uses these cards: {used}.")
        return self._governed[card].pause

    def _now(self) -> datetime:
        """Return the time in the time zone of the hours."""
        return datetime.now(ZoneInfo(self.limits.zone)) if self.limits.zone else datetime.now().astimezone()

    def _reload(self) -> None:
        """Apply a changed file; an invalid one is logged once and changes nothing."""
        try:
            limits = settings.changed(self._home, self.given)
        except ConfigInvalid as error:
            if self._complained != str(error):
                log.warning("limits not changed: %s", error)
            self._complained = str(error)
            return
        self._complained = ""
        if limits != self.limits:
            log.info("limits changed %s", limits.model_dump(exclude_defaults=True))
            self.limits = limits

    _complained = ""

    async def _measure(self, watch_cards: bool) -> None:
        measured: dict[str, Any] = {}
        if self.limits.idle_minutes:
            measured["idle_s"] = await trio.to_thread.run_sync(use.idle_s)
            measured["others_load"] = self._read_load()
        if not self.limits.on_battery:
            measured["on_battery"] = await trio.to_thread.run_sync(use.on_battery)
        if watch_cards or self.limits.power_watts or self._governed:
            self.cards = await trio.to_thread.run_sync(self._read_cards)
            measured["watts"] = self._power.update(sum(card.watts or 0.0 for card in self.cards.cards) or None)
            readings = {reading.number: reading for reading in self.cards.cards}
            for number, card in self._governed.items():
                reading = readings.get(number)
                card.celsius = reading.celsius if reading else None
                card.watts = card.power.update(reading.watts if reading else None)
        self._measured = measured
