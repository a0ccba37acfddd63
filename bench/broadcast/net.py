"""Parties with network namespaces of their own, on one bridge, each behind a capped link.

- A party's uplink is capped where it leaves the party, its downlink where it leaves the bridge.
- Nothing outside the namespaces is touched; their names carry this process's id, and leaving the context removes
  them with every process inside. What a killed run left behind is removed by the next one.
- Needs root and iproute2; `obstacle` says what is missing.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bench.broadcast.cells import Link

T = TypeVar("T")

PREFIX = "echo-bench"
NAMESPACES = Path("/run/netns")
SUBNET = "10.77.0"

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")

QUEUE_MS = 50
"""What a link holds back before it drops: a home router's."""

BURST_S = 0.005
BURST_MIN_BYTES = 16_384
"""A full-sized packet must pass, and a timer tick must not leave the link idle."""

_NEW_NETWORK = 0x40000000


def obstacle() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found; install iproute2" if missing else ""


def congestion_control() -> str:
    """How TCP shares links, which makes a twentieth of a broadcast: Linux's default, if a namespace may have it."""
    return "cubic" if "cubic" in ALLOWED.read_text().split() else "reno"


class Net:
    """Named parties that reach each other; `with Net(links) as net`."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = dict(links)
        self._tag = f"{PREFIX}-{os.getpid()}"
        self._hub = f"{self._tag}-hub"

    @property
    def parties(self) -> list[str]:
        return list(self._links)

    def __enter__(self) -> "Net":
        for path in left_behind(NAMESPACES):
            _remove(path.name)
        try:
            _ip("netns", "add", self._hub)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            for number, party in enumerate(self._links, 1):
                self._attach(number, party)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def address(self, party: str) -> str:
        return f"{SUBNET}.{1 + self.parties.index(party)}"

    def command(self, party: str, command: Sequence[str]) -> list[str]:
        """The command, run by a party."""
        return ["ip", "netns", "exec", self._namespace(party), *command]

    def call(self, party: str, work: Callable[[], T]) -> T:
        """Call a function in a party's place: the sockets it makes are the party's."""
        return call_in(self._namespace(party), work)

    def moved(self) -> dict[str, tuple[int, int]]:
        """Bytes that each party has sent and received on its link so far."""
        table = call_in(self._hub, lambda: Path(f"/proc/self/task/{threading.get_native_id()}/net/dev").read_text())
        rows = {name.strip(): line.split() for name, _, line in (row.partition(":") for row in table.splitlines())}
        ports = {party: rows[f"port{number}"] for number, party in enumerate(self._links, 1)}
        return {party: (int(row[0]), int(row[8])) for party, row in ports.items()}

    def close(self) -> None:
        """Remove everything; safe at any time."""
        for namespace in [*map(self._namespace, self._links), self._hub]:
            _remove(namespace)

    def _namespace(self, party: str) -> str:
        return f"{self._tag}-{party}"

    def _attach(self, number: int, party: str) -> None:
        inside, port, link = self._namespace(party), f"port{number}", self._links[party]
        _ip("netns", "add", inside)
        call_in(inside, lambda: Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion_control()))
        _ip("-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._hub)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", inside, "address", "add", f"{self.address(party)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", inside, "link", "set", device, "up")
        _cap(inside, "eth0", link.up_bit_s)
        _cap(self._hub, port, link.down_bit_s)


def call_in(namespace: str, work: Callable[[], T]) -> T:
    """Call a function in a thread that has entered a namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with (NAMESPACES / namespace).open("rb") as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            results.append(work())
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=enter, name=namespace)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _cap(namespace: str, device: str, bit_s: float) -> None:
    burst = max(BURST_MIN_BYTES, int(bit_s / 8 * BURST_S))
    shape = ["rate", f"{bit_s:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def left_behind(folder: Path) -> list[Path]:
    """What runs that were killed could not remove from a folder, known by the process ids in the names."""
    found = [(path, re.match(rf"{PREFIX}-(\d+)-", path.name)) for path in folder.glob(f"{PREFIX}-*")]
    return [path for path, match in found if match and not Path(f"/proc/{match[1]}").exists()]


def _remove(namespace: str) -> None:
    if not (NAMESPACES / namespace).exists():
        return
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    for pid in map(int, inside.split()):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
