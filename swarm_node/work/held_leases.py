"""The leases of one round that this node holds, and the state of each.

    reply to a request ───▶ OFFERED ──start──▶ OPEN ──close──▶ answered, cancelled or returned
                             ▲    └──return_leases──▶ returned
    reply to rollouts ──▶ WAITING

- OFFERED: the worker has neither started nor returned it yet.
- WAITING: the next turn of an episode, which the worker offers itself at once, whatever it waits for (`turns_came`).
- OPEN: its group is in the engine, and its progress is reported.
- A lease has one state. A lease that is held already is not added again.
- Returning is best effort, also while the program stops: a lease that is not returned expires.
"""

import logging
from collections.abc import Collection, Iterable, Sequence

import trio

from protocol import limits
from protocol.errors import SwarmError
from protocol.work.lease import Lease
from protocol.work.messages import ReturnLeases
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.work.progress_reporter import ProgressReporter

log = logging.getLogger(__name__)

TURNS_WAITING_MAX = limits.LEASES_PER_REQUEST_MAX
"""Turns that wait until they are started; more are returned, as the coordinator offers more than this node answered."""

RETURN_S = 1.0
"""Time-out for returning leases, also when the agent stops."""


class HeldLeases:
    """Leases that this node has neither answered nor returned."""

    def __init__(self, coordinator: Coordinator, reporter: ProgressReporter) -> None:
        self._coordinator = coordinator
        self._reporter = reporter
        self.open: dict[str, Lease] = {}
        """Leases in the engine."""
        self._offered = set[str]()
        self._turns: dict[str, Lease] = {}
        self.turns_came = trio.Event()
        """Set while turns wait; `offer_turns` replaces it."""
        self.plays = False
        """True if the leases that were started last are turns of episodes."""
        self.closed_at = 0.0
        """Time at which a group last left the engine."""

    @property
    def has_turns(self) -> bool:
        """True if turns wait."""
        return bool(self._turns)

    @property
    def has_open_turn(self) -> bool:
        """True if a turn of an episode is in the engine."""
        return any(lease.turn_tokens_max for lease in self.open.values())

    def is_held(self, lease_id: str) -> bool:
        """Return True if a lease has a state."""
        return lease_id in self.open or lease_id in self._offered or lease_id in self._turns

    def add_offered(self, leases: Iterable[Lease]) -> set[str]:
        """Add leases of a reply as offered; return the ids of those that were not held."""
        new = {lease.lease_id for lease in leases if not self.is_held(lease.lease_id)}
        self._offered |= new
        return new

    def add_turn(self, lease: Lease) -> bool:
        """Add a turn that waits; return False if too many wait already."""
        if len(self._turns) >= TURNS_WAITING_MAX:
            return False
        self._turns[lease.lease_id] = lease
        self.turns_came.set()
        return True

    def offer_turns(self) -> list[Lease]:
        """Make the turns that wait offered leases; return them."""
        turns = list(self._turns.values())
        self._offered |= self._turns.keys()
        self._turns, self.turns_came = {}, trio.Event()
        return turns

    def start(self, leases: Sequence[Lease]) -> None:
        """Make offered leases open: their groups are passed to the engine."""
        for lease in leases:
            self._offered.discard(lease.lease_id)
            self.open[lease.lease_id] = lease
            self._reporter.start(lease)
        self.plays = any(lease.turn_tokens_max for lease in leases)

    def close(self, lease_id: str) -> None:
        """Remove a lease whose group has left the engine; a lease that was cancelled meanwhile is not open any more."""
        self.open.pop(lease_id, None)
        self.closed_at = trio.current_time()
        self._reporter.forget(lease_id)

    async def return_leases(self, lease_ids: Collection[str]) -> None:
        """Return leases that are not open to the coordinator, even while being cancelled."""
        if not lease_ids:
            return
        self._offered.difference_update(lease_ids)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + RETURN_S):
            try:
                await self._coordinator.return_leases(ReturnLeases(lease_ids=tuple(lease_ids)))
            except SwarmError as error:
                log.info("cannot return %d leases; they will expire (%s)", len(lease_ids), error.code)

    async def return_offered(self) -> None:
        """Return every offered lease."""
        await self.return_leases(sorted(self._offered))

    async def return_all(self) -> None:
        """Return every lease: the worker ends."""
        lease_ids = [*self.open, *sorted(self._offered), *self._turns]
        for lease_id in tuple(self.open):
            self.close(lease_id)
        self._turns = {}
        await self.return_leases(lease_ids)
