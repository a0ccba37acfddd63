"""A real PostgreSQL for the ledger's tests and bench: a cluster of its own in a folder, reached by a Unix socket.

- Found where Debian's package puts it, or on the PATH; `missing` says what is not there.
- It refuses to run as root, so root starts it as `postgres`.
- `durable` decides whether a commit waits for the disk: tests of meaning need not, a bench must.
"""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

USER = "postgres"


def binaries() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, the newest version's."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def missing() -> str:
    """Return why no PostgreSQL can be tested here, or nothing."""
    if binaries() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "its driver is not installed (the extra `postgres`)"
    return ""


@dataclass
class Server:
    """A running server and the folder of its files."""

    url: str
    folder: Path

    def kill(self) -> None:
        """End the server as a machine that is lost ends it: without a word to anybody."""
        control(self.folder, "-m", "immediate", "stop")


@contextmanager
def cluster(*, durable: bool) -> Iterator[str]:
    """A running cluster's URL; the cluster and its files are gone afterwards."""
    with server(durable=durable) as made:
        yield made.url


@contextmanager
def server(*, durable: bool) -> Iterator[Server]:
    """Return the server with its folder; it may have been ended meanwhile."""
    with _folder() as folder:
        _run(
            folder, str(_binary("initdb")), "-D", f"{folder}/data", "-U", USER, "-A", "trust", "-N", "--locale=C.UTF-8"
        )
        with _started(folder, durable=durable) as made:
            yield made


@contextmanager
def replica(first: Server) -> Iterator[Server]:
    """A server that repeats what the first one writes; from now on the first answers when the second has it."""
    with _folder() as folder:
        place = f"host={first.folder} user={USER} application_name=standby"
        _run(folder, str(_binary("pg_basebackup")), "-D", f"{folder}/data", "-R", "-X", "stream", "-d", place)
        with _started(folder, durable=False) as made:
            for setting in ("synchronous_standby_names = 'standby'", "synchronous_commit = 'on'"):
                _run(first.folder, str(_binary("psql")), "-h", str(first.folder), "-c", f"ALTER SYSTEM SET {setting}")
            control(first.folder, "reload")
            yield made


def control(folder: Path, *words: str) -> None:
    """Have `pg_ctl` do something with the server of a folder."""
    _run(folder, str(_binary("pg_ctl")), "-D", f"{folder}/data", "-w", "-s", *words)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, USER)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _started(folder: Path, *, durable: bool) -> Iterator[Server]:
    options = f"-k {folder} -c listen_addresses= -c fsync={'on' if durable else 'off'}"
    control(folder, "-o", options, "start")
    try:
        yield Server(f"postgresql+psycopg://{USER}@/postgres?host={folder}", folder)
    finally:
        with suppress(subprocess.CalledProcessError):  # ended already
            control(folder, "-m", "immediate", "stop")


def _binary(name: str) -> Path:
    here = binaries()
    assert here is not None, missing()
    return here / name


def _run(folder: Path, *command: str) -> None:
    user = USER if os.geteuid() == 0 else None
    # To files and not to pipes: the server inherits them, and a pipe would stay open as long as it runs.
    subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
