"""Dials: one at a time to each peer, shared by all who wait for it, and what became of them.

- A dial goes on to its own end when nobody waits any more: else a peer whose firewall swallows packets was never tried.
- Whether a peer could be dialled is remembered until it is told; one success outweighs failures.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio

from protocol import limits
from protocol.ids import NodeId
from protocol.work.messages import Peer

STAGGER_S = 0.25
"""Between two addresses of one peer: longer than most answers take, shorter than anybody minds."""


async def race(attempts: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Try each a moment after the one before, or as soon as that has failed; return with the first that succeeds.

    If none does, the first failure is raised.
    """
    failures: list[Exception] = []
    succeeded = False

    async def attempt(one: Callable[[], Awaitable[object]], over: trio.Event) -> None:
        nonlocal succeeded
        try:
            await one()
        except Exception as error:  # py-libp2p lets any layer's exception through; the first is raised below
            failures.append(error)
            over.set()
        else:
            succeeded = True
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for one in attempts:
            over = trio.Event()
            nursery.start_soon(attempt, one, over)
            with trio.move_on_after(STAGGER_S):
                await over.wait()
    if not succeeded:
        raise failures[0]


@dataclass(eq=False)
class _Dial:
    """One dial under way."""

    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


class Dials:
    """All dials of one host."""

    def __init__(self, dial: Callable[[Peer], Awaitable[None]], nursery: trio.Nursery) -> None:
        self._dial, self._nursery = dial, nursery
        self._under_way: dict[NodeId, _Dial] = {}
        self._answered: dict[NodeId, bool] = {}

    def start(self, peer: Peer) -> _Dial:
        """Dial a peer, unless that is under way."""
        name = NodeId(peer.peer_id)
        if name not in self._under_way:
            self._under_way[name] = _Dial()
            self._nursery.start_soon(self._run, peer, self._under_way[name])
        return self._under_way[name]

    async def reach(self, peer: Peer) -> None:
        """Return when the peer is connected; a failed dial is raised."""
        dial = self.start(peer)
        await dial.done.wait()
        if dial.error is not None:
            raise dial.error

    def record(self, name: NodeId, answered: bool) -> None:
        """A dial came to its end, or its connection is used again."""
        self._answered[name] = answered or self._answered.pop(name, False)
        while len(self._answered) > 2 * limits.DIALS_MAX:
            del self._answered[next(iter(self._answered))]

    def take_report(self) -> tuple[list[NodeId], list[NodeId]]:
        """Who answered and who did not, since it was last told."""
        told, self._answered = self._answered, {}
        return [name for name, yes in told.items() if yes], [name for name, yes in told.items() if not yes]

    async def _run(self, peer: Peer, dial: _Dial) -> None:
        try:
            await self._dial(peer)
        except Exception as error:  # py-libp2p lets any layer's exception through; whoever waits is told
            dial.error = error
        finally:
            del self._under_way[NodeId(peer.peer_id)]
            dial.done.set()
        self.record(NodeId(peer.peer_id), dial.error is None)
