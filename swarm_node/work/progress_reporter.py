"""Reporter of progress: sends the tokens of running groups, so that other nodes can continue if this one is lost.

- Only leases older than `REPORT_EVERY_S` are reported; a node whose groups end sooner reports nothing.
- Those leases are due together, at multiples of `REPORT_EVERY_S`: one request reports all of them.
- A caller reads the tokens of a lease with `report_every_ms`: the first ones are reported at once, later ones at that
  interval. In time the interval is a share of the lease's age, so that a lease of hours has at most `FRAGMENTS_MAX`
  fragments: the coordinator keeps no more of them, and its caller would read the rest only at the end.
- New tokens of a group are signed once and sent until they are received; meanwhile later tokens are collected.
- A lease that the coordinator reports as gone is cancelled at once: more work for it would be wasted.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import trio

from protocol import limits
from protocol.errors import SwarmError, Unreachable
from protocol.policy import chunks
from protocol.wire.signing import NodeKey
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease
from protocol.work.messages import LeaseProgress
from swarm_node.coordinator_api.client import Coordinator

log = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0
"""Interval between reports of a lease, also before the first: a lost node loses at most this much work."""

AGE_SHARE = 1 / 24
"""The interval between reports of a lease that a caller reads, as a share of its age, once that is longer."""


Cancel = Callable[[Collection[str]], Awaitable[None]]


@dataclass
class ReportedLease:
    """Reporting state of one lease."""

    lease: Lease
    began_at: float
    due_at: float
    gathered: list[FragmentPart] = field(default_factory=list)
    sealed: tuple[str, bytes] | None = None
    """Hash and bytes of a signed fragment that is not received yet."""
    head: str = ""
    ended: bool = False
    """True if the coordinator accepts no more fragments of this lease."""

    @classmethod
    def started(cls, lease: Lease, now: float) -> "ReportedLease":
        """Return the state of a lease that starts now."""
        return cls(lease, now, now if lease.report_every_s else REPORT_EVERY_S * (math.ceil(now / REPORT_EVERY_S) + 1))

    @property
    def next_at(self) -> float:
        """Time of the next report; a lease that a caller reads has none before it has new tokens."""
        has_grown = self.sealed is not None or (bool(self.gathered) and not self.ended)
        return self.due_at if has_grown or not self.lease.report_every_s else math.inf

    def schedule_next(self, now: float) -> None:
        """Set the time of the next report."""
        if every_s := self.lease.report_every_s:
            self.due_at = now + max(every_s, AGE_SHARE * (now - self.began_at))
        else:
            self.due_at = REPORT_EVERY_S * (math.floor(now / REPORT_EVERY_S) + 1)


class ProgressReporter:
    """Reporter of the worker's open leases."""

    def __init__(self, coordinator: Coordinator, key: NodeKey, round_id: str) -> None:
        self._coordinator, self._key, self._round_id = coordinator, key, round_id
        self._leases: dict[str, ReportedLease] = {}
        self._changed = trio.Event()
        """Set when a lease that may be due before all others has started, or has new tokens for its caller."""

    def start(self, lease: Lease) -> None:
        """Start reporting a lease that the worker has started."""
        self._leases[lease.lease_id] = ReportedLease.started(lease, trio.current_time())
        self._changed.set()

    def add_tokens(self, lease_id: str, parts: Collection[FragmentPart]) -> None:
        """Record new tokens of a lease."""
        if state := self._leases.get(lease_id):
            state.gathered += parts
            if state.lease.report_every_s:
                self._changed.set()

    def forget(self, lease_id: str) -> None:
        """Stop reporting a lease that the worker has closed."""
        self._leases.pop(lease_id, None)

    async def run(self, cancel: Cancel) -> None:
        """Report when leases are due, until cancelled; call `cancel` with leases no longer needed."""
        while True:
            with trio.move_on_at(min((state.next_at for state in self._leases.values()), default=math.inf)):
                await self._changed.wait()
            self._changed = trio.Event()
            try:
                if gone := await self.report():
                    log.info("%d leases cancelled by the coordinator", len(gone))
                    await cancel(gone)
            except Unreachable:
                continue  # the heartbeat logs this; the report is repeated
            except SwarmError as error:
                log.warning("cannot report lease progress code=%s: %s", error.code, error)

    async def report(self) -> list[str]:
        """Report every lease that is due; return those that the coordinator no longer needs."""
        now = trio.current_time()
        due = [state for state in self._leases.values() if now >= state.next_at]
        for state in due:
            state.schedule_next(now)
        sealed = [state for state in due if self._seal(state)][: limits.LEASES_PER_REQUEST_MAX]
        held = tuple(state.lease.lease_id for state in due if state in sealed or not state.lease.report_every_s)
        if not held:
            return []
        fragments = tuple(state.sealed[1] for state in sealed if state.sealed)
        reply = await self._coordinator.progress(LeaseProgress(held=held, fragments=fragments))
        for state in sealed:
            state.head, state.sealed = state.sealed[0] if state.sealed else "", None
            state.ended = state.lease.lease_id not in reply.taken
        return [lease_id for lease_id in reply.gone if lease_id in self._leases]

    def _seal(self, state: ReportedLease) -> bool:
        """Sign the collected tokens, if no fragment is pending; return True if there is a fragment to send."""
        if state.sealed is None and state.gathered and not state.ended:
            fragment = Fragment(
                round_id=self._round_id,
                lease_id=state.lease.lease_id,
                lease_digest=state.lease.digest,
                previous=state.head,
                parts=tuple(_merged(state.gathered)),
            )
            payload = fragment.to_bytes()
            state.sealed, state.gathered = (chunks.digest(payload), self._key.seal("fragment", payload)), []
        return state.sealed is not None


def _merged(parts: Collection[FragmentPart]) -> list[FragmentPart]:
    """Return one merged part for each sample."""
    merged: dict[int, FragmentPart] = {}
    for part in parts:
        if before := merged.get(part.sample):
            part = before.model_copy(
                update={
                    "tokens": before.tokens + part.tokens,
                    "logprobs": before.logprobs + part.logprobs,
                    "finish": part.finish,
                }
            )
        merged[part.sample] = part
    return list(merged.values())
