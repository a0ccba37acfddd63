"""The governor: reads the machine's state every few seconds, applies the owner's limits, and opens or closes the gate.

- Only the values that a limit needs are read: a node without limits starts no program for them.
- Cards and user input are read in a thread, so that a hanging driver does not block the agent.
- `pause`, `resume`, `finish` and `leave` take effect at once; a changed `limits.toml` at the next reading.
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
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import trio

from protocol import limits
from protocol.errors import ConfigInvalid
from swarm_node.allowance import settings
from swarm_node.allowance.rules import GB, Decision, Readings, decide
from swarm_node.base.disk import write_durably
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
        look_at_cards: Callable[[], gpu.GpuProbe] = gpu.find_cards,
        look_at_load: Callable[[int], float | None] = use.others_load,
    ) -> None:
        self._home, self._uploads, self._price, self._given = home, uploads, price, given or {}
        self._look_at_cards = look_at_cards
        self._look_at_load = partial(look_at_load, threads)
        self._paused = self._finishing = False
        self._mean_watts: float | None = None
        self._measured_at = -math.inf
        self._changed = trio.Event()
        self._looked: dict[str, Any] = {}
        self.leaving = trio.Event()
        """Set by `leave`, and when a finishing node has no work left."""
        self.cards = gpu.GpuProbe()
        """Last reading of the graphics cards, for display."""
        self.limits = settings.changed(home, self._given)
        self.decision = Decision()
        self._decide()

    @property
    def finishing(self) -> bool:
        return self._finishing

    async def run(self, *, watch_cards: bool = False) -> None:
        """Read and decide at intervals until cancelled; `watch_cards` reads the cards even if no limit needs them."""
        while True:
            self._reload()
            await self._look(watch_cards)
            self._decide()
            with trio.move_on_after(LOOK_EVERY_S):
                await self.changes()

    async def changes(self) -> None:
        """Return when the decision has changed."""
        await self._changed.wait()

    async def opened(self) -> None:
        """Return when the node may work, or must finish."""
        while not (self.decision.may_work or self.finishing):
            await self.changes()

    async def closed(self) -> None:
        """Return when the node may not work."""
        while self.decision.may_work:
            await self.changes()

    def pause(self) -> None:
        """Return the running leases, and accept no work until `resume`."""
        self._paused = True
        self._decide()

    def resume(self) -> None:
        """Work again, if the limits allow it; a finishing node continues, too."""
        self._paused = self._finishing = False
        self._decide()

    def finish(self) -> None:
        """Accept no more work, and leave when the running groups have ended and are sent."""
        self._finishing = True
        self._decide()

    def leave(self) -> None:
        """Leave now, and return the running leases."""
        self.leaving.set()

    def _decide(self) -> None:
        self._uploads.cap_bytes = int(self.limits.upload_gb * GB) or None
        seen = Readings(
            now=datetime.now(ZoneInfo(self.limits.zone)) if self.limits.zone else datetime.now().astimezone(),
            paused=self._paused,
            finishing=self._finishing,
            resting=any(reason.why == "power" for reason in self.decision.reasons),
            uploaded_bytes=self._uploads.this_month(),
            price_micros_per_mtok=self._price,
            **self._looked,
        )
        before, self.decision = self.decision, decide(self.limits, seen)
        whys = [reason.why for reason in self.decision.reasons]
        if whys != [reason.why for reason in before.reasons]:
            log.info("work paused: %s", self.decision.reason_line) if whys else log.info("work continues")
        if self.decision.no_upload and not before.no_upload:
            log.info("uploads stopped: %s", self.decision.no_upload)
        if self.decision != before:
            self._changed.set()
            self._changed = trio.Event()

    def _reload(self) -> None:
        """Apply a changed file; an invalid one is logged once and changes nothing."""
        try:
            limits = settings.changed(self._home, self._given)
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

    async def _look(self, watch_cards: bool) -> None:
        looked: dict[str, Any] = {}
        if self.limits.idle_minutes:
            looked["idle_s"] = await trio.to_thread.run_sync(use.idle_s)
            looked["others_load"] = self._look_at_load()
        if not self.limits.on_battery:
            looked["on_battery"] = await trio.to_thread.run_sync(use.on_battery)
        if watch_cards or self.limits.power_watts:
            self.cards = await trio.to_thread.run_sync(self._look_at_cards)
            looked["watts"] = self._mean(sum(card.watts or 0.0 for card in self.cards.cards) or None)
        self._looked = looked

    def _mean(self, watts: float | None) -> float | None:
        """Return the mean power of the last minutes, including this reading."""
        now = trio.current_time()
        passed_s, self._measured_at = now - self._measured_at, now
        if watts is None:
            return None
        weight = 1 - math.exp(-passed_s / WATTS_OVER_S)
        self._mean_watts = watts if self._mean_watts is None else self._mean_watts + weight * (watts - self._mean_watts)
        return self._mean_watts
