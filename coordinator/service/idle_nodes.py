"""Requests of idle nodes for leases, which are held until there is work for them.

- A call for work goes to the nodes that wait the longest, one for each query; the others sleep on.
- A node that finds nothing, since it holds another version than the one asked for, passes the call on to the next of
  those that waited when the call was made. So a call ends.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice


class IdleNode:
    """A held request."""

    def __init__(self, nodes: "IdleNodes") -> None:
        self._nodes = nodes
        self._call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.number = 0

    @property
    def is_called(self) -> bool:
        return self._call.done()

    def call(self, last: int) -> None:
        """Call it; `last` is the number of the last request that this call may reach."""
        self._call.set_result(last)

    async def called(self, patience_s: float) -> bool:
        """Return True as soon as there is a call; False if none comes in time."""
        await asyncio.wait([self._call], timeout=patience_s)
        return self.is_called

    def pass_on(self) -> None:
        """Wait again, behind all others, and have the next node answer the call."""
        last, self._call = self._call.result(), asyncio.get_running_loop().create_future()
        self._nodes.wait_last(self)
        self._nodes.call(1, last)


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
    def waiting(self) -> Iterator[IdleNode]:
        """Hold a request for the duration of the block."""
        node = IdleNode(self)
        self.wait_last(node)
        try:
            yield node
        finally:
            del self._waiting[node]

    def wait_last(self, node: IdleNode) -> None:
        """Place a request behind all others."""
        self._waiting.pop(node, None)
        node.number = self._last = next(self._numbers)
        self._waiting[node] = None

    def call(self, nodes: int, last: int | None = None) -> None:
        """Call up to so many nodes that wait; those up to the number `last`, if it is given."""
        if last is None:
            last = self._last
            self.calls += 1
        free = (node for node in self._waiting if node.number <= last and not node.is_called)
        for node in list(islice(free, nodes)):
            node.call(last)

    def call_all(self) -> None:
        """Call every node that waits."""
        self.call(len(self._waiting))
