"""Dials to peers: at most one at a time per peer, shared by all callers that wait for it, and their results.

- A dial continues to its own end even if no caller waits any more: otherwise a peer whose firewall drops packets would
  never count as tried.
- The result per peer is kept until `take_report` returns it; one success outweighs failures.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio

from protocol import limits
from protocol.ids import NodeId
from protocol.work.messages import Peer

STAGGER_S = 0.25
"""Pause between two addresses of one peer: longer than most answers take, too short to notice."""


async def race(attempts: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Start the attempts `STAGGER_S` apart, or as soon as the previous one fails; return when the first succeeds.

    If none does, the first failure is raised.
    """
    failures: list[Exception] = []
    succeeded = False

    async def attempt(dial: Callable[[], Awaitable[object]], over: trio.Event) -> None:
        nonlocal succeeded
        try:
            await dial()
        except Exception as error:  # py-libp2p lets any layer's exception through; the first is raised below
            failures.append(error)
            over.set()
        else:
            succeeded = True
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for dial in attempts:
            over = trio.Event()
            nursery.start_soon(attempt, dial, over)
            with trio.move_on_after(STAGGER_S):
                await over.wait()
    if not succeeded:
        raise failures[0]


@dataclass(eq=False)
class _Dial:
    """Dial under way."""

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
        """Return when the peer is connected; raise the error of a failed dial."""
        dial = self.start(peer)
        await dial.done.wait()
        if dial.error is not None:
            raise dial.error

    def record(self, name: NodeId, answered: bool) -> None:
        """Record the result of a dial, or that its connection is used again."""
        self._answered[name] = answered or self._answered.pop(name, False)
        while len(self._answered) > 2 * limits.DIALS_MAX:
            del self._answered[next(iter(self._answered))]

    def take_report(self) -> tuple[list[NodeId], list[NodeId]]:
        """Return the peers that answered and those that did not since the last call."""
        results, self._answered = self._answered, {}
        return [name for name, yes in results.items() if yes], [name for name, yes in results.items() if not yes]

    async def _run(self, peer: Peer, dial: _Dial) -> None:
        try:
            await self._dial(peer)
        except Exception as error:  # py-libp2p lets any layer's exception through; `reach` raises it
            dial.error = error
        finally:
            del self._under_way[NodeId(peer.peer_id)]
            dial.done.set()
        self.record(NodeId(peer.peer_id), dial.error is None)
