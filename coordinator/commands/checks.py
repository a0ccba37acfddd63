"""Checks of a round's settings against this machine: files, the round in its folder, and the ports.

Files on the hub, and the contents of files, are checked when they are fetched and read.

- An address is tried by binding it, as the server does. Nothing is sent to whoever listens there.
- On Linux, /proc names the process. Other users' processes are visible to root only; elsewhere, none is.
- A coordinator and its seeder are recognised by the lock of their round, which the coordinator holds open.
"""

import errno
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.config import Config, fixed
from coordinator.config.manual import written
from coordinator.config.reading import Mistake
from coordinator.config.round import HUB
from coordinator.learner import start
from coordinator.tasks.kinds import FROM_FILES, code_files, require_known, unused_settings
from protocol.errors import ConfigInvalid, SwarmError
from protocol.people.addresses import host_and_port

ADDRESSES = ("listen", "tls_listen", "seeder")
"""The keys of [round] that are addresses of this machine."""

BESIDE = {
    "learner.lora_rank": ("model",),
    **{f"round.{key}": ("round.directory",) for key in ADDRESSES},
    **dict.fromkeys(("data.train", "data.eval", "reward.functions"), ("task",)),
}
"""The settings and sections that the mistakes of another setting depend on."""


def require(config: Config) -> None:
    """Raise an error that names the first missing file or unknown task."""
    require_known(config.task.name)
    for mistake in _missing_files(config):
        raise ConfigInvalid(mistake.message, hint=mistake.hint)
    start.require_here(config.model)


def require_code(config: Config) -> None:
    """Raise an error that names the first missing file of the operator's code, of which a round has no copy."""
    for mistake in _missing_files(config):
        if mistake.path in ("task.name", "reward.functions"):
            raise ConfigInvalid(mistake.message, hint=mistake.hint)


def require_free_ports(config: Config) -> None:
    """Raise an error that says who holds the addresses of a round that is about to start."""
    mistakes = list(busy_ports(config))
    if mistakes:
        message, hint = " ".join(each.message for each in mistakes), " ".join(each.hint for each in mistakes)
        raise ConfigInvalid(message, hint=hint)


def find_mistakes(config: Config, left_out: Sequence[str] = ()) -> Iterator[Mistake]:
    """Yield every mistake in valid settings that this machine shows.

    The settings and sections `left_out` are wrong and have their defaults, of which nothing is said.
    """
    if not left_out:
        yield from _changed_settings(config)
    for mistake in _on_this_machine(config):
        names = (mistake.path, *BESIDE.get(mistake.path, ()))
        if not any(_is_of(name, other) or _is_of(other, name) for name in names for other in left_out):
            yield mistake


def _is_of(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.")


def _on_this_machine(config: Config) -> Iterator[Mistake]:
    try:
        require_known(config.task.name)
    except SwarmError as error:
        yield Mistake("task.name", error.message, error.hint)
    missing = list(_missing_files(config))
    yield from missing
    for key, unused in unused_settings(config):
        if key not in {each.path for each in missing}:
            yield Mistake(key, unused.message, unused.hint)
    if config.task.name in FROM_FILES and not config.data.train:
        yield Mistake("data.train", f"Task {config.task.name} needs problems.", "Set data.train to a file or folder.")
    try:
        start.require_here(config.model)
    except SwarmError as error:
        yield Mistake("model.path", error.message, error.hint)
    try:
        start.require_trained(config)
    except SwarmError as error:
        yield Mistake("learner.lora_rank", error.message, error.hint)
    yield from busy_ports(config)


def busy_ports(config: Config) -> Iterator[Mistake]:
    """Yield the addresses that another process holds; those of this round, if it is running, are its own."""
    seen = dict[str, str]()
    for key in ADDRESSES:
        address = getattr(config.round, key)
        if not address:
            continue
        host, port = host_and_port(address)
        if port and address in seen:
            yield Mistake(
                f"round.{key}", f"round.{key} = {address} is also round.{seen[address]}.", "Use another port."
            )
            continue
        seen[address] = key
        holder = find_holder(host, port, "coordinator.lock")
        if holder is not None and holder.folder != config.round.directory:
            yield Mistake(
                f"round.{key}",
                f"round.{key} = {address} is in use by {holder}.",
                f"Stop it, or set round.{key} to a free port.",
            )


def _changed_settings(config: Config) -> Iterator[Mistake]:
    folder = config.round.directory
    for change in fixed.changes(config):
        yield Mistake(
            change.path,
            f"{change.path} is {written(change.wanted)}, and the round in {folder} was launched with "
            f"{written(change.was)}.",
            "The first launch fixed it: set the old value, or give the new round another round.directory.",
        )


def _missing_files(config: Config) -> Iterator[Mistake]:
    """Yield the operator's files and folders that do not exist, by the setting that names them."""
    named = [("task.name" if file == config.task.name else "reward.functions", file) for file in code_files(config)]
    named += [("data.train", config.data.train), ("data.eval", config.data.eval)]
    for key, place in named:
        if place and not place.startswith(HUB) and not Path(place).exists():
            hint = "Relative paths start at the current folder."
            if key.startswith("data.") and start.is_name_on_hub(place):
                hint += f" For a data set on the hub, write {HUB}{place}."
            yield Mistake(key, f"{key}: {place} does not exist.", hint)


def left_to_the_hub(config: Config) -> list[str]:
    """Return a warning if the settings name models or data on the hub, which is not asked."""
    named = {"model.path": config.model.path, "data.train": config.data.train, "data.eval": config.data.eval}
    if not (there := [key for key, place in named.items() if place.startswith(HUB)]):
        return []
    return [
        f"The hub is not asked whether {' and '.join(there)} can be used: `task check`, `plan --gpu` and `launch` ask."
    ]


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
