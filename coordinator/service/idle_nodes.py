"""Requests of idle nodes for leases, which are held until there is work for them.

- A call for work goes to the nodes that wait the longest, one for each query; the others sleep on.
- While a query is being recorded, its node's offer waits directly behind it for the store: the query and its lease are
  one commit. If the query is not recorded, the node waits on in its place, as if it had not been called.
- A node that finds nothing, since it holds another version than the one asked for, or that hangs up, passes the call on
  to the next of those that waited when the call was made. So a call ends.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice

import sqlalchemy as sa

from coordinator.store.state import FollowingEffect
from protocol.work.messages import LeaseReply

Offer = Callable[[sa.Connection], LeaseReply]
"""The effect that answers a request with the leases that its node may have now."""


@dataclass(frozen=True)
class Call:
    """A call for work."""

    last: int
    """The number of the last request that it may reach."""
    offered: "asyncio.Future[LeaseReply | None] | None" = None
    """The outcome of the node's offer, which waits for the store; None if the node has to make one."""


class IdleNode:
    """A held request."""

    def __init__(self, nodes: "IdleNodes", make_offer: Callable[[], Offer | None]) -> None:
        self._nodes = nodes
        self._call = _no_call()
        self.make_offer = make_offer
        """Returns None if the node has left or has to load another version first."""
        self.number = 0

    @property
    def is_called(self) -> bool:
        return self._call.done()

    def call(self, call: Call) -> None:
        self._call.set_result(call)

    def follow(self, offer: Offer, last: int) -> FollowingEffect[LeaseReply]:
        """Call it with an offer that waits for the store behind a query."""
        follower = FollowingEffect(offer, asyncio.get_running_loop().create_future())
        follower.answer.add_done_callback(self._wait_on)
        self.call(Call(last, follower.answer))
        return follower

    async def called(self, patience_s: float) -> Call | None:
        """Return the call as soon as there is one; None if none comes in time."""
        call = self._call  # it is replaced at once if a query is refused
        await asyncio.wait([call], timeout=patience_s)
        return call.result() if call.done() else None

    def pass_on(self) -> None:
        """Wait again, behind all others, and have the next node answer the call."""
        last, self._call = self._call.result().last, _no_call()
        self._nodes.wait_last(self)
        self._nodes.call(1, last)

    def _wait_on(self, answer: "asyncio.Future[LeaseReply | None]") -> None:
        """Wait again in the same place, if the query of a call was not recorded."""
        if not answer.cancelled() and answer.exception() is None and answer.result() is None:
            self._call = _no_call()


def _no_call() -> asyncio.Future[Call]:
    return asyncio.get_running_loop().create_future()


class IdleNodes:
    """All held requests of this process, the longest held first."""

    def __init__(self) -> None:
        self._waiting: dict[IdleNode, None] = {}
        self._numbers = count(1)
        self._last = 0
        self.calls = 0
        """The number of calls so far: a request that makes its offer while one comes looks again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def waiting(self, make_offer: Callable[[], Offer | None]) -> Iterator[IdleNode]:
        """Hold a request for the duration of the block."""
        node = IdleNode(self, make_offer)
        self.wait_last(node)
        try:
            yield node
        except asyncio.CancelledError:
            if node.is_called:
                node.pass_on()
            raise
        finally:
            del self._waiting[node]

    def wait_last(self, node: IdleNode) -> None:
        """Place a request behind all others."""
        self._waiting.pop(node, None)
        node.number = self._last = next(self._numbers)
        self._waiting[node] = None

    def follow(self, queries: int) -> list[FollowingEffect[LeaseReply]]:
        """Call up to `queries` nodes, and return their offers, which must wait for the store behind these queries."""
        offers = ((node, offer) for node in self._free() if (offer := node.make_offer()) is not None)
        return [node.follow(offer, self._last) for node, offer in islice(offers, queries)]

    def call(self, nodes: int, last: int | None = None) -> None:
        """Call up to so many nodes that wait; those up to the number `last`, if it is given."""
        if last is None:
            last = self._last
            self.calls += 1
        for node in list(islice((node for node in self._free() if node.number <= last), nodes)):
            node.call(Call(last))

    def call_all(self) -> None:
        """Call every node that waits."""
        self.call(len(self._waiting))

    def _free(self) -> list[IdleNode]:
        return [node for node in self._waiting if not node.is_called]
