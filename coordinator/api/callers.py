"""Who is connected: so many connections of one address, and no answers kept for those who do not read them.

- Every `LOOK_S` all connections are looked at. Of an address that has more than its share the newest are closed.
- An answer that waits in memory to be read may take the grace and the time that its size needs at the rate at which
  bodies must come; it begins anew where more was written, as a stream does while it is read. All such answers together
  hold at most `UNREAD_MAX_BYTES`, else the largest go first.
- What comes from this machine is the operator's own, or a proxy's, which speaks for many: it has no share to pass. A
  proxy elsewhere wants `round.connections_per_address=0`, and to bound its callers itself.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from coordinator.api import http
from protocol.limits import MIB

LOOK_S = 2.0

UNREAD_MAX_BYTES = 256 * MIB
"""A few times the largest files of the ledger and the board for as many slow readers."""

OWN = ("127.", "::1", "::ffff:127.")
"""How the addresses of this machine begin."""


def is_own(address: str) -> bool:
    return address.startswith(OWN)


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

    def __init__(self, runner: web.AppRunner, per_address: int) -> None:
        self._runner = runner
        self._per_address = per_address
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
            await asyncio.sleep(LOOK_S)  # a timer: a caller may be too much for so long
            self._look(asyncio.get_running_loop().time())

    def _look(self, now_s: float) -> None:
        held = Counter[str]()
        unread: dict[web.RequestHandler, _Unread] = {}
        for one in self._runner.server.connections if self._runner.server else ():  # the oldest first
            if one.transport is None:
                continue
            address = str((one.transport.get_extra_info("peername") or ("",))[0])
            held[address] += 1
            if 0 < self._per_address < held[address] and not is_own(address):
                one.transport.abort()
            elif size := one.transport.get_write_buffer_size():
                unread[one] = self._unread.get(one, _Unread(now_s, size, size)).seen(size, now_s)
        self._unread = unread
        self._cut_slow(now_s)

    def _cut_slow(self, now_s: float) -> None:
        total = sum(answer.last_bytes for answer in self._unread.values())
        for one, answer in sorted(self._unread.items(), key=lambda item: -item[1].last_bytes):
            may_take_s = http.GRACE_S + answer.began_bytes / http.RATE_BYTES_PER_S
            if total > UNREAD_MAX_BYTES or now_s - answer.since_s > may_take_s:
                total -= answer.last_bytes
                if one.transport is not None:
                    one.transport.abort()
