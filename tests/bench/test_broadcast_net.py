"""The broadcast bench in real network namespaces: links are capped, everything arrives, nothing stays behind."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.broadcast.cells import MBIT, Link, parse
from bench.broadcast.contender import SOURCE, bad_bytes, make_payload
from bench.broadcast.net import PREFIX, Net, congestion_control, obstacle
from bench.broadcast.race import race

needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there is no obstacle")

FAST = Link(100 * MBIT, 100 * MBIT)


@pytest.fixture
def nothing_stays_behind() -> Iterator[None]:
    before = devices_and_namespaces()
    yield
    assert devices_and_namespaces() == before


def devices_and_namespaces() -> str:
    listings = (["ip", "-brief", "link"], ["ip", "netns", "list"])
    return "".join(subprocess.run(listing, capture_output=True, text=True, check=True).stdout for listing in listings)


def test_a_damaged_copy_is_counted_byte_by_byte(tmp_path: Path) -> None:
    payload = make_payload(tmp_path / "payload", 10_000)
    copy = tmp_path / "copy"
    assert bad_bytes(copy, payload) == payload.stat().st_size
    data = bytearray(payload.read_bytes())
    copy.write_bytes(data)
    assert bad_bytes(copy, payload) == 0
    data[5000] ^= 1
    copy.write_bytes(data[:-3])
    assert bad_bytes(copy, payload) == 4


@pytest.mark.processes
@needs_namespaces
@pytest.mark.usefixtures("nothing_stays_behind")
def test_parties_reach_each_other_and_what_they_send_is_counted() -> None:
    with Net({SOURCE: FAST, "w1": FAST}) as net:
        address = (net.address(SOURCE), 9000)
        with (
            net.call(SOURCE, lambda: socket.create_server(address)) as server,
            net.call("w1", lambda: socket.create_connection(address)) as client,
        ):
            accepted, (caller, _) = server.accept()
            with accepted:
                assert caller == net.address("w1")
                shares = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert shares.rstrip(b"\0").decode() == congestion_control()
                client.sendall(bytes(100_000))
                client.shutdown(socket.SHUT_WR)
                while accepted.recv(65536):
                    pass
        moved = net.moved()
        assert moved["w1"][0] > 100_000
        assert moved[SOURCE][1] > 100_000


@pytest.mark.processes
@needs_namespaces
@pytest.mark.usefixtures("nothing_stays_behind")
def test_a_failure_inside_leaves_no_namespace_and_no_process() -> None:
    left: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with Net({SOURCE: FAST, "w1": FAST}) as net:
            left.append(subprocess.Popen(net.command("w1", ["sleep", "1000"])))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left[0].wait() != 0


@pytest.mark.processes
@needs_namespaces
@pytest.mark.usefixtures("nothing_stays_behind")
def test_the_namespaces_of_a_killed_run_are_removed_by_the_next() -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    subprocess.run(["ip", "netns", "add", f"{PREFIX}-{killed.pid}-hub"], check=True)
    with Net({SOURCE: FAST}):
        pass


@pytest.mark.processes
@needs_namespaces
@pytest.mark.usefixtures("nothing_stays_behind")
def test_three_mirrors_get_everything_no_sooner_than_the_bound() -> None:
    cell = parse("3:3:uniform", worker_mbit_s=40, size_bytes=3 * 2**20)
    (lap,) = race(cell, ["ours"], rounds=1)
    assert set(lap.outcome.seconds) == {"w1", "w2", "w3"}
    assert lap.outcome.bad_bytes == 0
    assert min(lap.outcome.seconds.values()) > 0.9 * cell.bound_s
    assert sum(lap.outcome.bytes_from.values()) >= 3 * 0.99 * cell.size_bytes
    assert max(up for up, _ in lap.use.links.values()) <= 1.1
