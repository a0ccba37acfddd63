"""The process that already listens on an address of this machine, and the round that it belongs to.

- An address is tried by binding it, as the server does. Nothing is sent to whoever listens there.
- On Linux, /proc names the process. Other users' processes are visible to root only; elsewhere, none is.
- A coordinator and its seeder are recognised by the lock of their round, which the coordinator holds open.
"""

import errno
import shlex
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""
COMMAND_MAX_CHARS = 160


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port; pid 0 if it cannot be seen from here."""

    pid: int = 0
    command: str = ""
    folder: Path | None = None
    """The folder of the round whose coordinator or seeder it is."""

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        what = f"the round in {self.folder}" if self.folder else "another program"
        return f"{what} (pid {self.pid}: {self.command})"


def find_holder(host: str, port: int, lock: str) -> PortHolder | None:
    """Return who holds an address; None if it is free, or if no address can be made of it.

    `lock` is the name of the file that a coordinator holds open in its round's folder.
    """
    if port == 0 or not _is_taken(host, port):
        return None
    return next(_holders(port, lock), PortHolder())


def _is_taken(host: str, port: int) -> bool:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                tried.bind(address)
                tried.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def _holders(port: int, lock: str) -> Iterator[PortHolder]:
    """Yield the visible processes with a listening socket on a port."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for place in PROC.glob("[0-9]*") if sockets else ():
        if sockets.intersection(_open_files(place)):
            yield PortHolder(int(place.name), _command(place), _folder(place, lock))


def _inodes(port: int) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _open_files(place: Path) -> set[str]:
    """Return what a process has open; nothing if it has ended or is another user's."""
    found = set()
    with suppress(OSError):
        for handle in (place / "fd").iterdir():
            with suppress(OSError):
                found.add(str(handle.readlink()))
    return found


def _command(place: Path) -> str:
    with suppress(OSError):
        words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):  # a script
            words = words[1:]
        return shlex.join([Path(words[0]).name, *words[1:]])[:COMMAND_MAX_CHARS] if words else ""
    return ""


def _folder(place: Path, lock: str) -> Path | None:
    """Return the folder of the round of a coordinator, or of the coordinator whose child a process is."""
    for process in (place, PROC / _parent(place)):
        for name in _open_files(process):
            if name.endswith(f"/{lock}"):
                return Path(name).parent
    return None


def _parent(place: Path) -> str:
    with suppress(OSError):
        return (place / "stat").read_text().rpartition(")")[2].split()[1]
    return "0"
