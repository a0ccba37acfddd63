"""Parties with network namespaces of their own, on one bridge, each behind a capped link.

- A party's uplink is capped where it leaves the party, its downlink where it leaves the bridge.
- A party behind NAT has a router of its own, in one more namespace, which stands at its place on the bridge.
- Nothing outside the namespaces is touched; their names carry this process's id, and leaving the context removes
  them with every process inside. What a killed run left behind is removed by the next one.
- Needs root and iproute2, and nftables where somebody is behind NAT; `obstacle` says what is missing.
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
from bench.broadcast.nat import Nat, firewall_rules, router_rules

T = TypeVar("T")

PREFIX = "echo-bench"
NAMESPACES = Path("/run/netns")
SUBNET = "10.77.0"
INSIDE = "10.78"
"""The networks behind the routers are parts of this one."""

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")

QUEUE_MS = 50
"""The time that a link holds back before it drops: a home router's."""

BURST_S = 0.005
BURST_MIN_BYTES = 16_384
"""A full-sized packet must pass, and a timer tick must not leave the link idle."""

_NEW_NETWORK = 0x40000000


def obstacle(*, nat: bool = False) -> str:
    """Return why namespaces cannot be made on this machine (with `nat`, those behind routers); empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {"ip": "iproute2", "tc": "iproute2"} | ({"nft": "nftables"} if nat else {})
    missing = [tool for tool in packages if shutil.which(tool) is None]
    needed = dict.fromkeys(packages[tool] for tool in missing)
    return f"{' and '.join(missing)} not found; install {' and '.join(needed)}" if missing else ""


def congestion_control() -> str:
    """Return the congestion control, which changes a broadcast by 5 %: Linux's default, if namespaces may use it."""
    return "cubic" if "cubic" in ALLOWED.read_text().split() else "reno"


class Net:
    """Named parties that reach each other; `with Net(links) as net`; `nat` says who is behind which kind."""

    def __init__(self, links: Mapping[str, Link], nat: Mapping[str, Nat] | None = None) -> None:
        self._links, self._nat = dict(links), dict(nat or {})
        self._tag = f"{PREFIX}-{os.getpid()}"
        self._hub = f"{self._tag}-hub"

    @property
    def parties(self) -> list[str]:
        return list(self._links)

    def __enter__(self) -> "Net":
        remove_left_behind()
        try:
            run_ip("netns", "add", self._hub)
            run_ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            run_ip("-n", self._hub, "link", "set", "bridge", "up")
            for number, party in enumerate(self._links, 1):
                self._attach(number, party)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def address(self, party: str) -> str:
        """Return the address at which others see a party: its own, or its router's."""
        return f"{SUBNET}.{1 + self.parties.index(party)}"

    def is_dialable(self, party: str) -> bool:
        """Return True if others get in without the party's doing."""
        return party not in self._nat

    def listen_host(self, party: str) -> str:
        """The address that a party's programs listen on; behind a router they do not know the one outside."""
        return self.address(party) if self.is_dialable(party) else "0.0.0.0"

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
        for namespace in [*map(self._namespace, self._links), *map(self._router, self._nat), self._hub]:
            remove_namespace(namespace)

    def _namespace(self, party: str) -> str:
        return f"{self._tag}-{party}"

    def _router(self, party: str) -> str:
        return f"{self._tag}-nat-{party}"

    def _attach(self, number: int, party: str) -> None:
        link, kind = self._links[party], self._nat.get(party)
        make_namespace(self._namespace(party))
        if kind is None or kind == "firewall":
            self._plug(self._namespace(party), "eth0", number, party, link)
        else:
            self._attach_router(number, party, link, kind)
        if kind == "firewall":
            _filter(self._namespace(party), firewall_rules())

    def _attach_router(self, number: int, party: str, link: Link, kind: Nat) -> None:
        """A router at the party's place on the bridge, and the party behind it."""
        party_space, router = self._namespace(party), self._router(party)
        gateway, inside = f"{INSIDE}.{number}.1", f"{INSIDE}.{number}.2"
        make_namespace(router)
        self._plug(router, "outside", number, party, link)
        run_ip("-n", party_space, "link", "add", "eth0", "type", "veth", "peer", "name", "inside", "netns", router)
        run_ip("-n", router, "address", "add", f"{gateway}/24", "dev", "inside")
        run_ip("-n", party_space, "address", "add", f"{inside}/24", "dev", "eth0")
        run_ip("-n", router, "link", "set", "inside", "up")
        run_ip("-n", party_space, "link", "set", "eth0", "up")
        run_ip("-n", party_space, "route", "add", "default", "via", gateway)
        call_in(router, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        _filter(router, router_rules(kind, outside=self.address(party), inside=inside))

    def _plug(self, namespace: str, device: str, number: int, party: str, link: Link) -> None:
        """Connect a namespace with the bridge, at the party's address, over its capped link."""
        port = f"port{number}"
        run_ip("-n", namespace, "link", "add", device, "type", "veth", "peer", "name", port, "netns", self._hub)
        run_ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        run_ip("-n", namespace, "address", "add", f"{self.address(party)}/24", "dev", device)
        run_ip("-n", namespace, "link", "set", device, "up")
        _cap(namespace, device, link.up_bit_s)
        _cap(self._hub, port, link.down_bit_s)


def make_namespace(namespace: str) -> None:
    """Make a namespace whose loopback device is up."""
    run_ip("netns", "add", namespace)
    call_in(namespace, lambda: Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion_control()))
    run_ip("-n", namespace, "link", "set", "lo", "up")


def _filter(namespace: str, rules: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", stdin=rules)


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
    """Return the files that killed runs left in a folder, found by the process ids in their names."""
    matches = [(path, re.match(rf"{PREFIX}-(\d+)-", path.name)) for path in folder.glob(f"{PREFIX}-*")]
    return [path for path, match in matches if match and not Path(f"/proc/{match[1]}").exists()]


def remove_left_behind() -> None:
    """Remove the namespaces of killed runs."""
    for path in left_behind(NAMESPACES):
        remove_namespace(path.name)


def remove_namespace(namespace: str) -> None:
    """End what runs in a namespace, and remove it; safe at any time."""
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


def run_ip(*arguments: str) -> None:
    """Run `ip`; raise OSError with its message if it fails."""
    _run("ip", *arguments)


def _run(*command: str, stdin: str = "") -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
