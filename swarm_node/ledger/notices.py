"""The coordinator's reports about earnings: changes of the payout address, rates and payouts, and the credit of today.

- A thief cannot change the payout address unnoticed. The last warning is saved in the round's folder: a change while
  the node was off is reported at its next start.
- Rates and payouts of an owner are public figures, which the coordinator does not sign. They are shown, and nothing is
  decided by them: the ledger proves what was credited and paid (`ledger receipts`, `ledger payouts`). An answer of
  another form, or none, means that the figures are not known; it is no error.
- The credit of today is the node's total now, less the last total of an earlier day, which is kept over restarts.
"""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import trio

from protocol.errors import SwarmError
from protocol.people.owner import Earnings
from protocol.text.money import EarningPace
from swarm_node.base.clock import now_ms
from swarm_node.base.disk import write_durably
from swarm_node.coordinator_api.client import Coordinator

AMOUNT_MAX = 2**62


class OwnerRates(NamedTuple):
    """Rates by node, and what the owner was paid."""

    nodes: Mapping[str, EarningPace]
    total: EarningPace
    paid_micros: int
    under_way_micros: int
    payouts: int
    last_ms: int | None
    """Time of the last payout; None before the first."""
    next_ms: int | None
    """Time at which the next batch is due; None without a schedule."""
    minimum_micros: int
    owner: str = ""

    def to_json(self, node_id: str = "") -> dict[str, Any]:
        """Return the figures as plain values, with the rate of one node or of all."""
        pace = self.nodes.get(node_id, EarningPace()) if node_id else self.total
        return {"rate": pace._asdict(), **dict(list(self._asdict().items())[2:])}


async def owner_rates(coordinator: Coordinator, owner: str) -> OwnerRates | None:
    """Request an owner's rates and payouts; None if the coordinator does not report them."""
    try:
        rates = parse_rates(await coordinator.rates(owner))
        return rates and rates._replace(owner=owner)
    except SwarmError:
        return None


def parse_rates(answer: Mapping[str, Any]) -> OwnerRates | None:
    """Parse an unsigned answer; None if it is of another form."""
    try:
        paces = {str(row["node_id"]): EarningPace.parse(row) for row in answer["nodes"]}
        total, paid, payouts = EarningPace.parse(answer["total"]), answer["paid"], answer["payouts"]
        if total is None:
            return None
        return OwnerRates(
            {node: pace for node, pace in paces.items() if pace is not None},
            total,
            _number(paid["paid_micros"]),
            _number(paid["under_way_micros"]),
            _number(paid["payouts"]),
            _moment(paid["last_ms"]),
            _moment(payouts["next_ms"]),
            _number(payouts["minimum_micros"]),
        )
    except (LookupError, TypeError, ValueError):
        return None


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= AMOUNT_MAX:
        raise ValueError
    return value


def _moment(value: object) -> int | None:
    return None if value is None else _number(value)


TODAY_FILE = "today.json"
"""File in a round's folder."""

log = logging.getLogger(__name__)


def local_day() -> date:
    """Return the day in the system's time zone."""
    return datetime.now().astimezone().date()


class EarnedToday:
    """Credit of a node since midnight, kept over restarts."""

    def __init__(self, path: Path, today: Callable[[], date]) -> None:
        self._path, self._today = path, today
        self._kept: tuple[str, int, int] | None = self._read()
        """Day of the last total, the last total of an earlier day, and the last total."""

    def update(self, total_micros: int) -> int:
        """Return the credit of today, now that the node's total is this one; save the total."""
        day = self._today().isoformat()
        if self._kept is None:
            base = total_micros
        else:
            kept_day, base, last = self._kept
            base = base if kept_day == day else last
        if self._kept != (day, base, total_micros):
            self._kept = (day, base, total_micros)
            write_durably(self._path, json.dumps(self._kept).encode(), temp_folder=self._path.parent)
        return total_micros - base

    def _read(self) -> tuple[str, int, int] | None:
        with suppress(OSError, ValueError, TypeError):
            day, base, last = json.loads(self._path.read_bytes())
            return str(day), int(base), int(last)
        return None


LOOK_EVERY_S = 60.0
"""Thousands of checks before a change applies; also the maximum age of the earnings shown to the owner."""

FIRST_LOOKS_S = (5.0, 10.0, 15.0, 30.0)
"""The first intervals: a new owner looks at `status` for the first credit."""


class Notices:
    """State of the owner's payout address."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._path = folder / "address.json"
        self._earned = EarnedToday(folder / TODAY_FILE, local_day)
        self.today_micros: int | None = None
        """Credit since midnight; None before the first answer."""
        self.last: tuple[int, Earnings] | None = None
        """The coordinator's last answer about earnings, with its time in ms."""
        self.rates: OwnerRates | None = None
        """The coordinator's last answer about rates and payouts; None before the first, or from an older one."""

    async def run(self) -> None:
        """Check at intervals until cancelled."""
        for interval_s in chain(FIRST_LOOKS_S, repeat(LOOK_EVERY_S)):
            try:
                earnings = await self._coordinator.earnings()
                self.last = (now_ms(), earnings)
                self.announce(earnings)
                self.rates = await owner_rates(self._coordinator, earnings.owner)
                await trio.to_thread.run_sync(self._count_today, earnings)
            except SwarmError as error:  # the heartbeat logs the cause
                log.debug("earnings not available: %s", error)
            await trio.sleep(interval_s)

    def _count_today(self, earnings: Earnings) -> None:
        for row in earnings.nodes:
            if row.node_id == self._coordinator.node_id:
                total = row.pending_micros + row.payable_micros + row.paying_micros + row.paid_micros
                self.today_micros = self._earned.update(total)

    def announce(self, earnings: Earnings) -> None:
        """Log what has changed, then save it."""
        said = [earnings.address, earnings.next_address, earnings.next_from_ms]
        if self._path.exists() and json.loads(self._path.read_text()) == said:
            return
        if earnings.next_address:
            log.warning(
                "your payout address changes to %s on %s; if you did not request this, set another address before then",
                earnings.next_address,
                day(earnings.next_from_ms),
            )
        elif earnings.address:
            log.warning("your earnings are paid to %s", earnings.address)
        write_durably(self._path, json.dumps(said).encode(), temp_folder=self._path.parent)


def day(moment_ms: int) -> str:
    """Return a time as text, in UTC."""
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d %H:%M UTC}"
