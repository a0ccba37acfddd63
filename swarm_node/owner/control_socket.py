"""The control socket in an agent's home: a Unix socket, or a loopback port with a token if there can be none.

- Only the user can access `control/` in the home (0700), the socket, and the file with port and token (0600).
- A socket's path has a limit (104 bytes on macOS), and Windows' Python has no Unix sockets: then the port is used.
- The holder of the home's lock owns the socket: files left by a killed agent are removed.
- A client that can connect may give every order; other users cannot connect.

Client of the running agent's control socket.
"""

import hmac
import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from protocol.errors import ConfigInvalid, SwarmError
from swarm_node.base.disk import disk_named
from swarm_node.keys.identity import FILE, require_no_agent

FOLDER, SOCKET, PORT = "control", "agent.sock", "port.json"
PATH_MAX_BYTES = 100
LINE_MAX_BYTES = 64 * 1024
"""A status has a few kilobytes, an order a few bytes."""


class NoAgent(SwarmError):
    """The home has no running agent."""

    code, http_status, fault = "no_agent", 404, "node"


@dataclass(frozen=True)
class Door:
    """Listener of the control socket, with the token that clients must send."""

    listener: trio.SocketListener
    token: str = ""

    def admits(self, token: object) -> bool:
        """Return True for the right token; a Unix socket has none, since the system has checked the user."""
        # JSON can spell half of a surrogate pair, which plain encoding would refuse with an error of its own.
        return isinstance(token, str) and hmac.compare_digest(token.encode(errors="surrogatepass"), self.token.encode())


async def open_door(home: Path) -> Door:
    """Listen in a home whose lock is held."""
    folder = home / FOLDER
    with disk_named(home):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        remove(home)
    path = folder / SOCKET
    if hasattr(socket, "AF_UNIX") and len(bytes(path.absolute())) <= PATH_MAX_BYTES:
        server = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await server.bind(str(path.absolute()))
        path.chmod(0o600)
        server.listen(8)
        return Door(trio.SocketListener(server))
    server = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    await server.bind(("127.0.0.1", 0))
    server.listen(8)
    token = secrets.token_hex(32)
    said = json.dumps({"port": server.getsockname()[1], "token": token}).encode()
    file = folder / PORT
    file.touch(mode=0o600)
    file.write_bytes(said)
    return Door(trio.SocketListener(server), token)


def remove(home: Path) -> None:
    """Remove the socket and the port file, if any."""
    for name in (SOCKET, PORT):
        (home / FOLDER / name).unlink(missing_ok=True)


async def knock(home: Path) -> tuple[trio.SocketStream, str]:
    """Connect to the agent of a home; return the connection and the token to send."""
    folder = home / FOLDER
    try:
        if (folder / PORT).exists():
            said = json.loads((folder / PORT).read_bytes())
            return await trio.open_tcp_stream("127.0.0.1", int(said["port"])), str(said["token"])
        if (folder / SOCKET).exists():
            return await trio.open_unix_socket(str((folder / SOCKET).absolute())), ""
    except PermissionError:
        raise ConfigInvalid(
            f"The agent in {home} belongs to another user.", hint="Run this command as the user who started the agent."
        ) from None
    except (OSError, ValueError, KeyError):  # left by an agent that was killed
        pass
    if is_in_use(home):
        raise NoAgent(f"The agent in {home} is starting or stopping.", hint="Try again in a few seconds.")
    raise NoAgent(
        f"No agent is running in {home}.", hint="Start one with `swarm-node join`, or give its folder with --home."
    )


def is_in_use(home: Path) -> bool:
    """Return True if a process uses the home, though it does not listen; False also if that cannot be checked."""
    try:
        if (home / FILE).is_file():
            require_no_agent(home)
    except ConfigInvalid:
        return True
    except (SwarmError, OSError):  # a folder that this user cannot read or write
        return False
    return False


async def read_line(stream: trio.abc.ReceiveStream) -> bytes:
    """Read one line of limited length; empty if the peer closed before its end."""
    data = bytearray()
    while b"\n" not in data:
        part = await stream.receive_some(4096)
        if not part or len(data) + len(part) > LINE_MAX_BYTES:
            return b""
        data += part
    return bytes(data.partition(b"\n")[0])


PATIENCE_S = 10.0


async def ask(home: Path, do: str, **options: float | str | None) -> dict[str, Any]:
    """Send an order with its options to the agent of a home; return its status right after."""
    order = {"do": do} | {name: value for name, value in options.items() if value is not None}
    with trio.move_on_after(PATIENCE_S):
        stream, token = await knock(home)
        async with stream:
            try:
                await stream.send_all(json.dumps(order | {"token": token}).encode() + b"\n")
                answer = await read_line(stream)
            except trio.BrokenResourceError:
                answer = b""
        if not answer:
            raise NoAgent(f"The agent in {home} is stopping.", hint="Try again in a few seconds.")
        said = json.loads(answer)
        if not said.pop("ok"):
            raise SwarmError.from_wire(said)
        status: dict[str, Any] = said["status"]
        return status
    raise NoAgent(
        f"The agent in {home} did not respond within {PATIENCE_S:g} s.",
        hint="It may be busy or suspended; `ps` shows its state.",
    )
