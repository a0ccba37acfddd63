"""A line with delay between two network namespaces: packets pass through this program, which holds each for a while.

- Each namespace has a TUN device, whose packets a thread reads, holds for half of the round trip, and writes into the
  other's. So everything is delayed, the handshake of a new connection, too.
- The line has no limit of its rate and loses nothing.
- The namespaces' names carry this process's id; leaving the context ends what runs inside and removes them. Needs root,
  iproute2 and /dev/net/tun; `obstacle` says what is missing.
"""

import fcntl
import heapq
import os
import select
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bench.broadcast.net import PREFIX, call_in, make_namespace, remove_left_behind, remove_namespace, run_ip

T = TypeVar("T")

TUN = Path("/dev/net/tun")
ADDRESSES = {"coordinator": "10.79.0.1", "node": "10.79.0.2"}
DEVICE = "line"
PACKET_MAX_BYTES = 65_536

_SET_DEVICE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000


def obstacle() -> str:
    """Return why there can be no such line on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip not found; install iproute2"
    return "" if TUN.exists() else f"{TUN} is missing"


class DelayedLine:
    """The parties `coordinator` and `node`, whose packets take half of `round_trip_s` to each other."""

    def __init__(self, round_trip_s: float) -> None:
        self._one_way_s = round_trip_s / 2
        self._tag = f"{PREFIX}-{os.getpid()}"
        self._devices: dict[str, int] = {}
        self._wake, self._end = os.pipe()
        self._carrier = threading.Thread(target=self._carry, name="line")

    def __enter__(self) -> "DelayedLine":
        remove_left_behind()
        try:
            for party, address in ADDRESSES.items():
                make_namespace(self._namespace(party))
                self._devices[party] = call_in(self._namespace(party), _open_device)
                os.set_blocking(self._devices[party], False)
                run_ip("-n", self._namespace(party), "address", "add", f"{address}/24", "dev", DEVICE)
                run_ip("-n", self._namespace(party), "link", "set", DEVICE, "up")
        except BaseException:
            self._remove()
            raise
        self._carrier.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._end)
        self._carrier.join()
        self._remove()

    def command(self, party: str, command: Sequence[str]) -> list[str]:
        """Return the command, run by a party."""
        return ["ip", "netns", "exec", self._namespace(party), *command]

    def call(self, party: str, work: Callable[[], T]) -> T:
        """Call a function in a party's place: the sockets it makes are the party's."""
        return call_in(self._namespace(party), work)

    def _namespace(self, party: str) -> str:
        return f"{self._tag}-{party}"

    def _remove(self) -> None:
        for party in ADDRESSES:
            remove_namespace(self._namespace(party))
        for device in self._devices.values():
            os.close(device)
        os.close(self._wake)

    def _carry(self) -> None:
        """Carry packets until the pipe is closed at its other end."""
        one, other = self._devices.values()
        opposite = {one: other, other: one}
        held: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            patience_s = None if not held else max(0.0, held[0][0] - time.monotonic())
            ready, _, _ = select.select([one, other, self._wake], [], [], patience_s)
            if self._wake in ready:
                return
            for device in ready:
                with suppress(BlockingIOError):
                    while packet := os.read(device, PACKET_MAX_BYTES):
                        number += 1
                        heapq.heappush(held, (time.monotonic() + self._one_way_s, number, opposite[device], packet))
            while held and held[0][0] <= time.monotonic():
                *_, device, packet = heapq.heappop(held)
                with suppress(OSError):  # the device is full or going: a lost packet, as on any line
                    os.write(device, packet)


def _open_device() -> int:
    """Make this namespace's device; return its file descriptor."""
    device = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    return device
