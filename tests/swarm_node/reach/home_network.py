"""A home network in namespaces: a machine, a router with NAT by nftables and Debian's miniupnpd, and the internet.

    home (192.168.77.2) ── router (192.168.77.1 | 45.77.1.1) ── outside (45.77.1.9)

- The addresses of the internet are public ones, since miniupnpd and the node tell those from private ones; nothing
  leaves the namespaces, whose names carry this process's id.
- `missing` says why it cannot be made here.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.broadcast.net import call_in
from tests.processes.programs import until

T = TypeVar("T")

HOME, ROUTER_INSIDE, ROUTER_OUTSIDE, OUTSIDE = "192.168.77.2", "192.168.77.1", "45.77.1.1", "45.77.1.9"

NAT = """
table inet filter {
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "lan" accept
        jump miniupnpd
    }
    chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
    chain postrouting {
        type nat hook postrouting priority 100
        jump postrouting_miniupnpd
        oifname "wan" masquerade
    }
    chain miniupnpd { }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
}
"""


def missing() -> str:
    """Return why no home network can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {"ip": "iproute2", "nft": "nftables", "miniupnpd": "miniupnpd-nftables"}
    absent = [package for tool, package in packages.items() if not shutil.which(tool)]
    return f"not installed (Debian: apt-get install {' '.join(absent)})" if absent else ""


class HomeNetwork:
    """The three namespaces, and a router that can be started, stopped and told to refuse."""

    def __init__(self, folder: Path, outside_of_router: str = ROUTER_OUTSIDE) -> None:
        self._folder, self._tag = folder, f"echo-home-{os.getpid()}"
        self._outside_of_router = outside_of_router
        self._daemon: subprocess.Popen[bytes] | None = None

    def name(self, party: str) -> str:
        """Return the namespace of home, router or outside."""
        return f"{self._tag}-{party}"

    def open(self) -> None:
        """Make the namespaces, links, routes and the NAT; what killed runs left behind is removed first."""
        for path in Path("/run/netns").glob("echo-home-*"):
            if not Path("/proc", path.name.split("-")[2]).exists():
                subprocess.run(["ip", "netns", "delete", path.name], capture_output=True)
        for party in ("home", "router", "outside"):
            _run("ip", "netns", "add", self.name(party))
            _run("ip", "-n", self.name(party), "link", "set", "lo", "up")
        for device, party, own, others in (
            ("lan", "home", ROUTER_INSIDE, HOME),
            ("wan", "outside", self._outside_of_router, OUTSIDE),
        ):
            peer = ("peer", "name", "eth0", "netns", self.name(party))
            _run("ip", "-n", self.name("router"), "link", "add", device, "type", "veth", *peer)
            for namespace, name, address in ((self.name("router"), device, own), (self.name(party), "eth0", others)):
                _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", name)
                _run("ip", "-n", namespace, "link", "set", name, "up")
        _run("ip", "-n", self.name("home"), "route", "add", "default", "via", ROUTER_INSIDE)
        self.call("router", lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        _run("ip", "netns", "exec", self.name("router"), "nft", "-f", "-", text=NAT)

    def close(self) -> None:
        """End the router and whatever else runs inside, and remove the namespaces."""
        self.stop_router()
        for party in ("home", "router", "outside"):
            listed = subprocess.run(["ip", "netns", "pids", self.name(party)], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", self.name(party)], capture_output=True)

    def start_router(self, *, natpmp: bool = True, upnp: bool = True, allow: bool = True) -> None:
        """Start miniupnpd, and wait until it listens."""
        rule = "allow 1024-65535 192.168.77.0/24 1024-65535" if allow else "deny 0-65535 0.0.0.0/0 0-65535"
        options = {"ext_ifname": "wan", "listening_ip": "lan", "secure_mode": "yes", "http_port": "0"}
        options |= {"enable_natpmp": _word(natpmp), "enable_upnp": _word(upnp)}
        options["uuid"] = "7fefa260-695d-4675-9ef6-e210f35af18b"
        lines = [*(f"{name}={value}" for name, value in options.items()), rule, "deny 0-65535 0.0.0.0/0 0-65535"]
        config, log = self._folder / "miniupnpd.conf", self._folder / "miniupnpd.log"
        config.write_text("\n".join(lines) + "\n")
        command = ["miniupnpd", "-d", "-4", "-f", str(config), "-P", str(self._folder / "miniupnpd.pid")]
        with log.open("wb") as output:
            whole = ["ip", "netns", "exec", self.name("router"), *command]
            self._daemon = subprocess.Popen(whole, stdout=output, stderr=output)
        wanted = [port for port, is_wanted in ((5351, natpmp), (1900, upnp)) if is_wanted]
        until("miniupnpd to listen", lambda: all(map(self._is_bound, wanted)))

    def stop_router(self) -> None:
        """Kill miniupnpd: a router that dies says nothing."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None

    def add_address(self, address: str) -> None:
        """Give the machine at home a second address, as another machine there would have."""
        _run("ip", "-n", self.name("home"), "address", "add", f"{address}/24", "dev", "eth0")

    def add_tunnel(self, routes: Sequence[str]) -> None:
        """Send what the machine at home has for the internet into a tunnel, as VPNs do."""
        home = ("ip", "-n", self.name("home"))
        _run(*home, "link", "add", "tunnel", "type", "veth", "peer", "name", "provider")
        _run(*home, "link", "set", "provider", "up")
        _run(*home, "address", "add", "10.8.0.2/24", "dev", "tunnel")
        _run(*home, "link", "set", "tunnel", "up")
        _run(*home, "route", "replace", "default", "via", ROUTER_INSIDE, "metric", "600")
        _run(*home, "route", "delete", "default", "via", ROUTER_INSIDE, "metric", "0")
        for route in routes:
            _run(*home, "route", "add", route, "dev", "tunnel", "metric", "50")

    def call(self, party: str, work: Callable[[], T]) -> T:
        """Call a function whose sockets are a party's."""
        return call_in(self.name(party), work)

    def command(self, party: str, *command: str) -> list[str]:
        """Return the command, run by a party."""
        return ["ip", "netns", "exec", self.name(party), *command]

    def can_dial(self, port: int) -> bool:
        """Return True if somebody on the internet is connected to this port of the router."""

        def dial() -> bool:
            with socket.socket() as caller:
                caller.settimeout(1.0)  # packets to a port that is not mapped are refused or dropped
                return caller.connect_ex((self._outside_of_router, port)) == 0

        return self.call("outside", dial)

    def forwarded(self) -> str:
        """Return the rules that miniupnpd has made."""
        command = self.command("router", "nft", "list", "chain", "inet", "filter", "prerouting_miniupnpd")
        return "\n".join(line for line in _run(*command).splitlines() if "dnat" in line)

    def _is_bound(self, port: int) -> bool:
        table = self.call("router", lambda: _udp_table())
        return any(line.split()[1].endswith(f":{port:04X}") for line in table)


@contextmanager
def home_network(folder: Path, outside_of_router: str = ROUTER_OUTSIDE) -> Iterator[HomeNetwork]:
    """Make a home network for the duration of the block."""
    network = HomeNetwork(folder, outside_of_router)
    try:
        network.open()
        yield network
    finally:
        network.close()


def _udp_table() -> Sequence[str]:
    """Return the UDP sockets of this thread's namespace."""
    return Path("/proc/thread-self/net/udp").read_text().splitlines()[1:]


def _word(is_on: bool) -> str:
    return "yes" if is_on else "no"


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
