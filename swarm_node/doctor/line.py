"""Checks of the connection to the round: coordinator, clock, speed in both directions, incoming connections.

- Traffic is limited: 8 MiB down, 2 MiB up. The downloaded chunks of the newest version are discarded.
- Incoming connections: if an agent runs, other nodes have tried, and the coordinator knows the result. Otherwise the
  coordinator dials back; behind a proxy it cannot, which is reported.
- A node that cannot be dialled works, too: it calls the nodes that it feeds.
"""

import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple

import trio

from protocol import limits
from protocol.errors import ConfigInvalid, SwarmError, named
from protocol.ids import ChunkId
from protocol.policy.description import RoundDescription
from protocol.policy.manifest import PolicyManifest
from protocol.work.messages import Dial
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.doctor.report import CheckResult, fail, ok, skip, warn
from swarm_node.owner import control_socket
from swarm_node.reach.listening import BOTH_FAMILIES, CAN, CANNOT, PORTS, ListenAddress, open_place

OFF_WARN_S, OFF_FAIL_S = 10.0, float(limits.CLOCK_SKEW_MAX_S)

DOWN_BYTES, DOWN_S = 8 * limits.MIB, 10.0
UP_BYTES, UP_S = 2 * limits.MIB, 20.0

SLOW_BYTES_PER_S = 1e6
"""8 Mbit/s: a patch of 100 MB takes two minutes, and is outdated when it arrives."""

SLOW_UP_BYTES_PER_S = 100e3
"""A group of long answers has 1 MB."""


class RoundAnswer(NamedTuple):
    """Answer of a round."""

    coordinator: Coordinator
    manifest: PolicyManifest | None
    description: RoundDescription | None = None


def clock(offset_s: float | None) -> CheckResult:
    """Check this machine's clock; the coordinator rejects requests if the difference is too large."""
    if offset_s is None:
        return skip("clock", "The coordinator did not report its time.")
    evidence = f"clock difference to the coordinator: {offset_s:+.1f} s (accurate to 1 s)"
    step = "Turn on automatic time: `timedatectl set-ntp true`, or the system's date settings."
    if abs(offset_s) >= OFF_FAIL_S:
        said = f"The clock is off by more than {OFF_FAIL_S:.0f} s: the coordinator would reject every request."
        return fail("clock", said, evidence, step)
    if abs(offset_s) >= OFF_WARN_S:
        return warn(
            "clock", "The clock is off. If the difference grows, the coordinator will reject requests.", evidence, step
        )
    return ok("clock", "The clock is correct.", evidence)


async def down(line: RoundAnswer) -> CheckResult:
    """Download chunks of the newest version from the coordinator, a node's last source."""
    if line.manifest is None:
        return skip("down", "Not checked: no version is published yet.")
    sizes = line.manifest.chunk_sizes()
    started, received = time.perf_counter(), 0
    try:
        with trio.move_on_after(DOWN_S):
            for chunk, size in sizes.items():
                received += len(await line.coordinator.origin.chunk(ChunkId(chunk), size))
                if received >= DOWN_BYTES:
                    break
    except SwarmError as error:
        step = "Check for a firewall or a proxy. A node downloads from peers first and from this address last."
        return warn("down", "Cannot download chunks from the coordinator.", named(error), step)
    if not received:
        return warn(
            "down",
            "No chunk arrived within 10 s.",
            f"{next(iter(sizes.values()), 0)} bytes",
            "Check the internet connection.",
        )
    rate = received / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.1f} MB/s over {received / 1e6:.1f} MB"
    if rate < SLOW_BYTES_PER_S and received >= limits.MIB:
        step = "Stop other downloads. New versions will arrive late, and late work is not paid."
        return warn("down", "The download speed is low.", evidence, step)
    return ok("down", "The download speed is sufficient.", evidence)


async def up(line: RoundAnswer) -> CheckResult:
    """Upload bytes that the coordinator discards."""
    data = secrets.token_bytes(UP_BYTES)
    started = time.perf_counter()
    try:
        with trio.fail_after(UP_S):
            arrived = (await line.coordinator.upload(data)).size_bytes
    except trio.TooSlowError:
        step = "Stop other uploads. Finished work will arrive late."
        return warn("up", "The upload speed is low.", f"{UP_BYTES} bytes took more than {UP_S:.0f} s", step)
    except SwarmError as error:
        return skip("up", f"The coordinator rejected the upload test: {named(error)}")
    rate = arrived / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.1f} MB/s over {arrived / 1e6:.1f} MB"
    if rate < SLOW_UP_BYTES_PER_S:
        step = "Stop other uploads. Finished work and chunks for peers will arrive late."
        return warn("up", "The upload speed is low.", evidence, step)
    return ok("up", "The upload speed is sufficient.", evidence)


TO_BE_DIALLED = (
    f"Optional: to accept connections, allow TCP ports {PORTS[0]} to {PORTS[-1]} in the firewall, and "
    f"forward port {PORTS[0]} from the router to this machine."
)


async def reach(line: RoundAnswer, listen: str, home: Path | None = None) -> CheckResult:
    """Report whether others could dial the running agent; without one, listen at its address and be dialled."""
    dialled = await _agent_was_dialled(home) if home else None
    if dialled is not None:
        evidence = "from other nodes' transfer receipts, counted by the coordinator"
        said = f"{CAN if dialled else CANNOT}."
        return ok("reach", said[0].upper() + said[1:], evidence if dialled else f"{evidence}. {TO_BE_DIALLED}")
    try:
        async with open_place(listen, line.coordinator.url) as place, await _listen(place) as listener:
            return await _be_dialled(line, listener, place)
    except (OSError, ValueError, ConfigInvalid) as error:  # a name with several addresses is a ValueError
        return fail(
            "reach",
            f"Cannot listen at {listen}.",
            str(error),
            "Choose another port with --listen; port 0 selects any free port.",
        )


async def _agent_was_dialled(home: Path) -> bool | None:
    try:
        said: bool | None = (await control_socket.ask(home, "status")).get("dialled")
    except SwarmError:  # none runs, or it is too busy to answer
        return None
    return said


async def _listen(place: ListenAddress) -> trio.SocketListener:
    if place.host != BOTH_FAMILIES:
        (listener,) = await trio.open_tcp_listeners(place.port, host=place.host)
        return listener
    server = trio.socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
    await server.bind((place.host, place.port))
    server.listen()
    return trio.SocketListener(server)


async def _be_dialled(line: RoundAnswer, listener: trio.SocketListener, place: ListenAddress) -> CheckResult:
    word = secrets.token_hex(16)
    chosen = int(listener.socket.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_say_word, listener, word)
        try:
            answer = await line.coordinator.dial_me(Dial(port=chosen, word=word))
        except SwarmError as error:
            return skip("reach", f"The coordinator did not test the connection: {named(error)}", TO_BE_DIALLED)
        finally:
            nursery.cancel_scope.cancel()
    if answer.proxied:
        return skip(
            "reach",
            "Not checked: the coordinator is behind a proxy and cannot test incoming connections.",
            TO_BE_DIALLED,
        )
    if answer.reached:
        return ok("reach", "The coordinator can connect to this machine.", f"port {chosen}")
    why = (
        "the node listens on this machine only"
        if place.is_loopback
        else "a router (NAT) or a firewall blocks the connection"
    )
    return ok("reach", f"Others cannot connect to this machine: {why}. The node works without it.", TO_BE_DIALLED)


async def _say_word(listener: trio.SocketListener, word: str) -> None:
    while True:
        stream = await listener.accept()
        try:
            with trio.move_on_after(1.0):
                await stream.send_all(word.encode())
        except trio.BrokenResourceError:
            pass  # a connection of another client
        finally:
            await stream.aclose()
