"""The teller: what this node has sampled of groups that take long, so that others can go on if it is lost.

- Only leases that are older than `TELL_S` are told of; a node whose groups end sooner never sends a word.
- What a group has grown by is signed once and sent until it is heard; meanwhile more gathers behind it.
- A lease that the coordinator calls gone is dropped at once: what is sampled for it would be in vain.
"""

import logging
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

TELL_S = 5.0
"""Between two words about a lease, and before the first: as much work is lost with a node at the most."""


Drop = Callable[[Collection[str]], Awaitable[None]]


@dataclass
class Tale:
    """What is told of one lease."""

    lease: Lease
    began_at: float
    gathered: list[FragmentPart] = field(default_factory=list)
    sealed: tuple[str, bytes] | None = None
    """A fragment under way, and its hash."""
    head: str = ""
    ended: bool = False
    """Whether the coordinator took no more of it."""


class ProgressReporter:
    """Tells of the leases that a worker has in hand."""

    def __init__(self, coordinator: Coordinator, key: NodeKey, round_id: str) -> None:
        self._coordinator, self._key, self._round_id = coordinator, key, round_id
        self._tales: dict[str, Tale] = {}

    def start(self, lease: Lease) -> None:
        """The worker has taken a lease."""
        self._tales[lease.lease_id] = Tale(lease, trio.current_time())

    def grew(self, lease_id: str, parts: Collection[FragmentPart]) -> None:
        """The engine has sampled more of a lease."""
        if tale := self._tales.get(lease_id):
            tale.gathered += parts

    def forget(self, lease_id: str) -> None:
        """The worker has answered a lease, or given it up."""
        self._tales.pop(lease_id, None)

    async def run(self, drop: Drop) -> None:
        """Tell for ever; `drop` is called with the leases that have ended elsewhere."""
        while True:
            await trio.sleep(TELL_S)
            try:
                if gone := await self.report():
                    log.info("%d leases cancelled by the coordinator", len(gone))
                    await drop(gone)
            except Unreachable:
                continue  # the heartbeat tells the owner; the same is said again
            except SwarmError as error:
                log.warning("cannot report lease progress code=%s: %s", error.code, error)

    async def report(self) -> list[str]:
        """Tell of every lease that is old enough; those that have ended elsewhere."""
        old = [tale for tale in self._tales.values() if trio.current_time() - tale.began_at >= TELL_S]
        told = [tale for tale in old if self._seal(tale)][: limits.LEASES_PER_REQUEST_MAX]
        if not old:
            return []
        held = tuple(tale.lease.lease_id for tale in old)
        fragments = tuple(tale.sealed[1] for tale in told if tale.sealed)
        reply = await self._coordinator.progress(LeaseProgress(held=held, fragments=fragments))
        for tale in told:
            tale.head, tale.sealed = tale.sealed[0] if tale.sealed else "", None
            tale.ended = tale.lease.lease_id not in reply.taken
        return [lease_id for lease_id in reply.gone if lease_id in self._tales]

    def _seal(self, tale: Tale) -> bool:
        """Sign what has gathered, if nothing is under way; whether there is something to send."""
        if tale.sealed is None and tale.gathered and not tale.ended:
            fragment = Fragment(
                round_id=self._round_id,
                lease_id=tale.lease.lease_id,
                lease_digest=tale.lease.digest,
                previous=tale.head,
                parts=tuple(_merged(tale.gathered)),
            )
            payload = fragment.to_bytes()
            tale.sealed, tale.gathered = (chunks.digest(payload), self._key.seal("fragment", payload)), []
        return tale.sealed is not None


def _merged(parts: Collection[FragmentPart]) -> list[FragmentPart]:
    """One part for each sample."""
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
