"""Who is connected: so many connections of one address, and no answers kept for those who do not read them.

- Every `look_s` all connections are checked, those that have not agreed on TLS yet, too. Of a neighbourhood that has
  more than its share the newest are closed.
- All together are as many as this process may have files, less those that it needs itself. Beyond, shares shrink until
  the rest fits: the largest neighbourhoods lose first.
- A connection that has not sent the whole head of a request within `head_s` is closed, a proxy's, too: these send heads
  at once. The first head begins with the connection, the next with its first byte: until then it may be idle.
- An answer that waits in memory to be read may take the grace and the time that its size needs at the rate at which
  bodies must come; it begins anew where more was written, as a stream does while it is read. All such answers together
  hold at most `unread_bytes`, else the largest go first.
- What comes from this machine is the operator's own, or a proxy's, which speaks for many: it has no share to pass. A
  proxy elsewhere wants `round.connections_per_address=0`, and to bound its callers itself.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from coordinator.api.bounds import Bounds
from coordinator.api.connections import Connection, Runner
from coordinator.api.places import HERE, place


@dataclass
class _Unread:
    """An answer that waits: since when, how large it was then, and at the last look."""

    since_s: float
    began_bytes: int
    last_bytes: int

    def seen(self, size: int, now_s: float) -> "_Unread":
        grew = size > self.last_bytes
        return _Unread(now_s, size, size) if grew else _Unread(self.since_s, self.began_bytes, size)


class Callers:
    """The connections of one server."""

    def __init__(self, runner: Runner, per_address: int, bounds: Bounds) -> None:
        self._runner = runner
        self._per_address = per_address
        self._bounds = bounds
        self._unread: dict[web.RequestHandler, _Unread] = {}

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Look after them as long as the application lives."""
        task = asyncio.create_task(self._keep_looking())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._bounds.look_s)  # a timer: a caller may be too much for so long
            self.look(asyncio.get_running_loop().time())

    def look(self, now_s: float) -> None:
        """Close what is too much."""
        found = self._runner.server.connections if self._runner.server else ()  # the oldest first
        open_ones = [(one, one.transport) for one in found if one.transport is not None]
        lines = [(one, line, self._place_of(line)) for one, line in (*open_ones, *self._runner.handshakes.items())]
        share = _share(Counter(where for _, _, where in lines), self._per_address, self._bounds.connections)
        held = Counter[str]()
        unread: dict[web.RequestHandler, _Unread] = {}
        for one, transport, where in lines:
            held[where] += 1
            if (held[where] > share and where != HERE) or self._is_late(one, now_s):
                transport.abort()
            elif isinstance(one, web.RequestHandler) and (size := transport.get_write_buffer_size()):
                unread[one] = self._unread.get(one, _Unread(now_s, size, size)).seen(size, now_s)
        self._unread = unread
        self._cut_slow(now_s)

    def _is_late(self, one: object, now_s: float) -> bool:
        since_s = one.head_since_s if isinstance(one, Connection) else None
        return since_s is not None and now_s - since_s > self._bounds.head_s

    def _place_of(self, transport: asyncio.Transport) -> str:
        address = str((transport.get_extra_info("peername") or ("",))[0])
        return place(address, self._bounds.own_addresses)

    def _cut_slow(self, now_s: float) -> None:
        total = sum(answer.last_bytes for answer in self._unread.values())
        for one, answer in sorted(self._unread.items(), key=lambda item: -item[1].last_bytes):
            may_take_s = self._bounds.grace_s + answer.began_bytes / self._bounds.bytes_per_s
            if total > self._bounds.unread_bytes or now_s - answer.since_s > may_take_s:
                total -= answer.last_bytes
                if one.transport is not None:
                    one.transport.abort()


def _share(held: Counter[str], share: int, total_max: int) -> int:
    """How many each neighbourhood may have, at most its share, so that all together are no more than that."""
    rest = total_max - held.pop(HERE, 0)
    share = min(share or sys.maxsize, max(held.values(), default=0))
    while share > 1 and sum(min(share, one) for one in held.values()) > rest:
        share -= 1
    return share
