"""The line to the round: does the coordinator answer, is the clock right, how fast is it both ways, who can dial in?

- Bytes are bounded: 8 MiB down, a few up. What is fetched are chunks of the newest version; they are thrown away.
- Whether others can dial in is tried: the coordinator dials back. Through a proxy it cannot, and that is said.
- A node that cannot be dialled works all the same: it calls those that it feeds.
"""

import ipaddress
import secrets
import time
from typing import NamedTuple

import trio

from protocol import limits
from protocol.errors import ConfigInvalid, SwarmError, named
from protocol.ids import ChunkId
from protocol.manifest import PolicyManifest
from protocol.places import host_and_port
from protocol.probe import Dial
from swarm_node.api_client import Coordinator
from swarm_node.doctor.report import Finding, fail, ok, skip, warn

OFF_WARN_S, OFF_FAIL_S = 10.0, float(limits.CLOCK_SKEW_MAX_S)

DOWN_BYTES, DOWN_S = 8 * limits.MIB, 10.0
UP_BYTES, UP_S = 2 * limits.MIB, 20.0

SLOW_BYTES_PER_S = 1e6
"""Eight megabit a second: a patch of 100 MB takes two minutes, and is old when it is here."""

SLOW_UP_BYTES_PER_S = 100e3
"""A group of long answers is a megabyte."""


class Line(NamedTuple):
    """A round that answered."""

    coordinator: Coordinator
    manifest: PolicyManifest | None


def clock(offset_s: float | None) -> Finding:
    """How far this machine's clock is off; whoever is off too far is not listened to."""
    if offset_s is None:
        return skip("clock", "The coordinator did not say what time it is.")
    evidence = f"the coordinator's is {offset_s:+.1f} s from this one, to a second"
    step = "Let the system keep the time: `timedatectl set-ntp true`, or the date settings."
    if abs(offset_s) >= OFF_FAIL_S:
        said = f"The clock is off by more than {OFF_FAIL_S:.0f} s: every request would be refused."
        return fail("clock", said, evidence, step)
    if abs(offset_s) >= OFF_WARN_S:
        return warn("clock", "The clock is off, and near to where requests are refused.", evidence, step)
    return ok("clock", "The clock is right.", evidence)


async def down(line: Line) -> Finding:
    """Fetch chunks of the newest version from the coordinator, as the last resort of a node is."""
    if line.manifest is None:
        return skip("down", "No version is published yet, so there is nothing to fetch.")
    sizes = line.manifest.chunk_sizes()
    started, received = time.perf_counter(), 0
    try:
        with trio.move_on_after(DOWN_S):
            for chunk, size in sizes.items():
                received += len(await line.coordinator.origin.chunk(ChunkId(chunk), size))
                if received >= DOWN_BYTES:
                    break
    except SwarmError as error:
        step = "Is there a firewall or a proxy? A node asks peers first, and this address last."
        return warn("down", "Chunks cannot be fetched from the coordinator.", named(error), step)
    if not received:
        return warn(
            "down", "No chunk came within ten seconds.", f"{next(iter(sizes.values()), 0)} bytes", "Is the line up?"
        )
    rate = received / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.1f} MB/s over {received / 1e6:.1f} MB"
    if rate < SLOW_BYTES_PER_S and received >= limits.MIB:
        step = "Other downloads on this line? New versions will be late here, and late work is not paid."
        return warn("down", "The line down is slow.", evidence, step)
    return ok("down", "The line down is fast enough.", evidence)


async def up(line: Line) -> Finding:
    """Send bytes that the coordinator throws away."""
    data = secrets.token_bytes(UP_BYTES)
    started = time.perf_counter()
    try:
        with trio.fail_after(UP_S):
            arrived = (await line.coordinator.upload(data)).size_bytes
    except trio.TooSlowError:
        step = "Other uploads on this line? Finished work will be late."
        return warn("up", "The line up is slow.", f"{UP_BYTES} bytes took more than {UP_S:.0f} s", step)
    except SwarmError as error:
        return skip("up", f"The coordinator takes no probe: {named(error)}")
    rate = arrived / max(1e-6, time.perf_counter() - started)
    evidence = f"{rate / 1e6:.1f} MB/s over {arrived / 1e6:.1f} MB"
    if rate < SLOW_UP_BYTES_PER_S:
        step = "Other uploads on this line? Finished work will be late, and nothing is passed on in time."
        return warn("up", "The line up is slow.", evidence, step)
    return ok("up", "The line up is fast enough.", evidence)


async def reach(line: Line, listen: str) -> Finding:
    """Listen where the node would, and have the coordinator dial it."""
    step = "The node calls others then. To be dialled: --listen 0.0.0.0:PORT, and forward that port in the router."
    word = secrets.token_hex(16)
    try:
        host, port = host_and_port(listen)
        (listener,) = await trio.open_tcp_listeners(port, host=host)
    except (OSError, ValueError, ConfigInvalid) as error:  # a name of several addresses is a ValueError here
        return fail(
            "reach", f"Nothing can listen at {listen}.", str(error), "Choose another port with --listen; 0 takes any."
        )
    chosen = int(listener.socket.getsockname()[1])
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(_say_word, listener, word)
        try:
            answer = await line.coordinator.dial_me(Dial(port=chosen, word=word))
        except SwarmError as error:
            return skip("reach", f"The coordinator dials nobody: {named(error)}", step)
        finally:
            nursery.cancel_scope.cancel()
    if answer.proxied:
        return skip("reach", "The coordinator is behind a proxy and cannot tell who can dial this machine.", step)
    if answer.reached:
        return ok("reach", "The coordinator can dial this machine.", f"port {chosen}")
    why = "it listens on this machine only" if _is_loopback(host) else "a router (NAT) or a firewall is in between"
    return ok("reach", f"Others cannot dial this machine: {why}. It works all the same.", step)


async def _say_word(listener: trio.SocketListener, word: str) -> None:
    while True:
        stream = await listener.accept()
        try:
            with trio.move_on_after(1.0):
                await stream.send_all(word.encode())
        except trio.BrokenResourceError:
            pass  # somebody else's visit
        finally:
            await stream.aclose()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
